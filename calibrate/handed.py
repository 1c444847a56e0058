"""What blocks are handed: by the model's code, and by blocks before them.

Hidden states of a sample are rows, one for each token. Where a block's K and V are read by later
blocks, too (Gemma 4 and 3n), they are in the same rows after the hidden states, from the block that
makes them to the last one that reads them: so whatever keeps hidden states, runs them through
quantized blocks or takes gradients back through them does so with K and V.

Masks and positions are alike for samples of one length. What depends on the tokens themselves (an
embedding of each block's own) is kept of each sample, in the host's memory.

A `Recorder` stands in the place of a block while the model's code runs for what it hands to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from calibrate.transfers import to_host
from formats.errors import CheckpointError
from formats.modeling.structure import AttentionSite, Structure

Place = int | str  # of an argument, by order or by name


@dataclass(frozen=True)
class Given:
    """What a model hands to one of its blocks beside the hidden states.

    Attributes:
        args: Arguments by place, after the hidden states.
        named: Name under which it hands over the hidden states; None where they come first.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    named: str | None = None

    def call(
        self, hidden: Tensor, others: Mapping[Place, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments of the block for hidden states, some others in the place of those here."""
        args = tuple(others.get(place, value) for place, value in enumerate(self.args))
        kwargs = {name: others.get(name, value) for name, value in self.kwargs.items()}
        if self.named is not None:
            return args, {**kwargs, self.named: hidden}
        return (hidden, *args), kwargs

    def to(self, device: torch.device) -> Given:
        """The same with its tensors on another device."""
        return Given(_moved(self.args, device), _moved(dict(self.kwargs), device), self.named)

    def places(self) -> dict[Place, Any]:
        """All arguments by their places."""
        return {**dict(enumerate(self.args)), **self.kwargs}

    def of_tokens(self, other: Given) -> list[Place] | None:
        """Places of the tensors that differ from those of a sample of other tokens.

        Returns:
            None where something else differs.
        """
        mine, theirs = self.places(), other.places()
        if mine.keys() != theirs.keys():
            return None
        found = [place for place, value in mine.items() if not _alike(value, theirs[place])]
        return found if all(isinstance(mine[place], Tensor) for place in found) else None


def _moved(value: Any, device: torch.device) -> Any:
    """A value, or what it holds, on another device, where these are tensors."""
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_moved(part, device) for part in value)
    if type(value) is dict:
        return {key: _moved(part, device) for key, part in value.items()}
    return value


def _alike(one: Any, other: Any) -> bool:
    """Whether two arguments are the same, tensors with all their values."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return isinstance(one, Tensor) == isinstance(other, Tensor)


@dataclass(frozen=True)
class Lent:
    """K and V of one block that later ones read: its key in their mapping, and its attention."""

    key: str
    site: AttentionSite

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of a token's K, and of its V."""
        heads = self.site.kv_heads
        return heads * self.site.key_size, heads * self.site.value_size

    def heads(self, rows: Tensor) -> Tensor:
        """Rows [T, heads * D] as [1, heads, T, D]."""
        return rows.unflatten(-1, (self.site.kv_heads, -1)).transpose(0, 1)[None]


@dataclass(frozen=True)
class Rows:
    """What the rows of samples hold before and after a block.

    Attributes:
        before: K and V of earlier blocks that this one or later ones read, after hidden states.
        after: Those that are read after it.
        name: Under which its code is handed the mapping of these.
        streams: How many hidden states a token has, where it has several (Gemma 3n).
    """

    before: tuple[Lent, ...] = ()
    after: tuple[Lent, ...] = ()
    name: str = ""
    streams: int | None = None

    @property
    def lent(self) -> int:
        """Numbers after the hidden states in a row before the block."""
        return sum(sum(own.sizes) for own in self.before)

    def states(self, rows: Tensor) -> Tensor:
        """Rows [T, ...] that hold hidden states alone, as the code has them: [1, T, hidden]; those
        of several samples are so."""
        if self.streams is None:
            return rows[None] if rows.dim() == 2 else rows
        return rows.unflatten(-1, (self.streams, -1)).transpose(0, 1)[:, None]

    def hidden(self, states: Tensor) -> Tensor:
        """The way back of `states`: [T, ...]."""
        if self.streams is None:
            return states[0] if len(states) == 1 else states
        return states[:, 0].transpose(0, 1).flatten(1)

    def apart(self, rows: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Rows before the block as hidden states, and K and V [1, heads, T, D] by their keys."""
        sizes = [size for own in self.before for size in own.sizes]
        hidden, *parts = rows.split([rows.shape[-1] - sum(sizes), *sizes], dim=-1)
        pairs = zip(self.before, parts[::2], parts[1::2], strict=True)
        return self.states(hidden), {own.key: (own.heads(k), own.heads(v)) for own, k, v in pairs}

    def together(self, states: Tensor, lent: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        """Rows after the block, of hidden states and of K and V as the code has them: [T, ...]."""
        if not self.after:
            return self.hidden(states)
        parts = (x[0].transpose(0, 1).flatten(1) for own in self.after for x in lent[own.key])
        return torch.cat((self.hidden(states), *parts), dim=-1)


def rows_of_blocks(structure: Structure, name: str | None, streams: int | None) -> Iterator[Rows]:
    """The rows before and after each block.

    Args:
        name: Under which blocks are handed the mapping that they fill; None for none.
        streams: As of `Rows`.

    Raises:
        CheckpointError: a block reads K and V of another one that is not in that mapping.
    """
    last: dict[str | None, int] = {}  # block that reads K and V of a module
    for index, block in enumerate(structure.blocks):
        if block.attention is not None and block.attention.lender is not None:
            last[block.attention.lender] = index
    lent: list[Lent] = []
    for index, block in enumerate(structure.blocks):
        site, before = block.attention, tuple(lent)
        if site is not None and site.module in last:
            if block.lends is None or name is None:
                raise CheckpointError(
                    f"{site.module}: later blocks read its K and V, and its code hands them over "
                    "in a way that calibration block by block does not keep"
                )
            lent.append(Lent(block.lends, site))
        lent = [own for own in lent if last[own.site.module] > index]
        yield Rows(before, tuple(lent), name or "", streams)


@dataclass
class Handed:
    """All that one block is handed.

    Attributes:
        given: By the model's code, for samples of each length.
        own: What of it depends on the tokens, of each sample.
    """

    given: dict[int, Given] = field(default_factory=dict)
    own: list[Mapping[Place, Tensor]] = field(default_factory=list)
    rows: Rows = field(default_factory=Rows)

    def note(self, length: int, given: Given, places: Sequence[Place]) -> None:
        """Keep what a sample of a length was handed, that of its tokens in some places."""
        self.given.setdefault(length, given)
        if places:
            values = given.places()
            self.own.append({place: to_host(values[place]) for place in places})

    def to(self, device: torch.device) -> Handed:
        """The same on another device, but for what is kept of each sample."""
        moved = {length: given.to(device) for length, given in self.given.items()}
        return Handed(moved, self.own, self.rows)

    def arguments(
        self, rows: Tensor, sample: int
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, tuple[Tensor, Tensor]]]:
        """All arguments of the block's code for a sample's rows, and the K and V among them."""
        hidden, lent = self.rows.apart(rows)
        own = _moved(dict(self.own[sample]), rows.device) if self.own else {}
        others: dict[Place, Any] = {**own, self.rows.name: lent} if self.rows.name else own
        return *self.given[rows.shape[-2]].call(hidden, others), lent


class Recorder(nn.Module):
    """Stands in a decoder block's place: records what it is given and passes on hidden states.

    Whatever else the model's code asks of the block, it finds there.

    Args:
        outputs: How many values the block gives as a tuple; None for hidden states alone.

    Attributes:
        hidden: Hidden states that it was handed last.
        given: All else.
    """

    hidden: Tensor | None = None

    def __init__(self, block: nn.Module, outputs: int | None) -> None:
        super().__init__()
        self.__dict__["_block"] = block
        self._outputs = outputs
        self.given = Given()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record what comes; gives hidden states as the block would."""
        named = next(iter(kwargs)) if not args else None
        self.hidden = args[0] if named is None else kwargs.pop(named)
        self.given = Given(args[1:], kwargs, named)
        rest = (None,) * ((self._outputs or 1) - 1)
        return self.hidden if self._outputs is None else (self.hidden, *rest)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"], name)


class AllRecordedError(Exception):
    """The last block was reached: what comes after it needs not be run."""


class LastRecorder(Recorder):
    """The recorder in the last block's place.

    Attributes:
        after: Hidden states [1, tokens, hidden] to go on with; None to stop here.
    """

    after: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """End the run, or go on with other hidden states."""
        passed = super().forward(*args, **kwargs)
        if self.after is None:
            raise AllRecordedError
        return self.after if self._outputs is None else (self.after, *passed[1:])
