"""Modules of transformers' code that keep a state beside K and V, over the rows of the step.

In the place of each stands `Stateful`. It hands the module's code the tokens of one piece of one
sequence at a time, or the next tokens of several sequences at once, with a cache of transformers'
own that is filled from their rows and read back after it. What the code keeps, its shapes and its
types are seen in a run on the meta device. What it computes right is found by comparing numbers:
some code begins at zero whenever it is given several tokens, and gets them one by one; some gives a
sequence other bits beside others, and gets each by itself where a backend's own bits do not change.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from formats.errors import CheckpointError
from formats.modeling.load import FAULTS
from formats.modeling.states import cache_argument
from inference.transformers_code.attention import current_step, only_rows, quiet
from inference.transformers_code.known import Constant, kinds_in_rows, methods_with, roundings
from inference.transformers_code.linear import Projections
from inference.transformers_code.state_rows import Piece, StatePool, StateShape, StatesInRows

PROBED = 6  # tokens that are compared


class _Every(list[Any]):
    """The one layer of a cache, whatever a module's number is."""

    def __getitem__(self, _: Any) -> Any:
        return super().__getitem__(0)

    def __len__(self) -> int:
        return 1 << 30


class _Cache(Cache):
    """A cache of one layer; lightning attention (MiniMax) has methods of its own for its state."""

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """The state, where there is one."""
        layer: Any = self.layers[layer_idx]
        return layer.recurrent_states[0] if layer.has_previous_state[0] else None

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        """Keep the state."""
        self.update_recurrent_state(state, layer_idx)


def _cache(layer: LinearAttentionLayer) -> Cache:
    return _Cache(layers=_Every([layer]))


class Stateful(nn.Module):
    """A module that keeps a state, in the place of transformers' own.

    Args:
        shapes: Of its states.
        count: How many of each kind it may have.

    Attributes:
        continues: Whether its code takes several tokens after a state.
        together: Whether its code may take several sequences at once.
        outputs: How many of what it gives are of tokens, the first; None as long as shapes tell.
        in_rows: Kinds of states that its functions read and write in their rows of a pool; those of
            convolutions for next tokens alone.
    """

    def __init__(self, mixer: nn.Module, shapes: Sequence[StateShape], count: int) -> None:
        super().__init__()
        self.mixer, self.shapes, self._count = mixer, tuple(shapes), count
        self._argument = cast(str, cache_argument(mixer))
        self._names = list(inspect.signature(mixer.forward).parameters)
        self._required = _required(mixer)
        self.continues = self.together = True
        self.outputs: int | None = None
        self.in_rows: Set[str] = frozenset()
        self.projections = Projections(mixer)
        self._pools: list[StatePool] = []
        self._values: int | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # its block's code may look at it
            return getattr(super().__getattr__("mixer"), name)

    def keep(self, rows: int, device: torch.device, int8: int | None = None) -> int:
        """Have so many rows of states, the last ones in int8, as `StatePool`; tells their bytes."""
        self._pools = [StatePool(own, rows, device, int8) for own in self.shapes]
        return sum(pool.nbytes for pool in self._pools)

    def copy_rows(self, sources: Tensor, targets: Tensor, *, kept: bool) -> None:
        """Copy states from some rows to as many others, all at once; as `StatePool.copy`."""
        for pool in self._pools:
            pool.copy(sources, targets, kept=kept)

    def round_row(self, row: int) -> None:
        """As `StatePool.round`."""
        for pool in self._pools:
            pool.round(row)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own: hidden states [1, T, H] to the same, or to all that is of tokens."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        x = given.pop(self._names[0])
        if "attention_mask" in given:  # padding, of which there is none
            given["attention_mask"] = None
        pieces = [part for piece in current_step().pieces for part in self._parts(piece)]
        if [len(piece.tokens) for piece in pieces] == [x.shape[1]]:  # all of the step, in its order
            found = self._run(x[0], pieces[0], given)
            return self._returned([y.flatten(0, 1)[None] for y in found])
        outputs: list[Tensor] = []
        with self.projections.step(x[0]) if len(pieces) > 1 else nullcontext():
            for piece in pieces:
                found = self._run(x[0, piece.tokens], piece, given)
                outputs = outputs or [x.new_zeros(*x.shape[:2], *own.shape[2:]) for own in found]
                if not self.projections.check(found[0]):
                    for y, own in zip(outputs, found, strict=True):
                        y[0, piece.tokens] = own.flatten(0, 1)
            later = self.projections.outputs()
        return self._returned(outputs if later is None else [later[None]])

    def _returned(self, outputs: Sequence[Tensor]) -> Any:
        """What the module's code returns, of its outputs of tokens [1, T, ...]."""
        if self._values is None:
            return outputs[0]
        return (*outputs, *(None,) * (self._values - len(outputs)))  # others may be in its tuple

    def _parts(self, piece: Piece) -> list[Piece]:
        """A piece, or its tokens one by one where the code cannot do otherwise."""
        several = len(piece.rows) > 1
        count = len(piece.tokens)
        if count == 1 or (self.together if several else self.continues or piece.begins):
            return [piece]
        rows = piece.rows if several else piece.rows.expand(count)
        keeps = piece.keeps if several else None
        parts = [
            Piece(x, row, keeps=None if keeps is None else keeps[i : i + 1])
            for i, (x, row) in enumerate(zip(piece.tokens.split(1), rows.split(1), strict=True))
        ]
        if not several:
            parts[0] = replace(parts[0], begins=piece.begins)
            parts[-1] = replace(parts[-1], keeps=piece.keeps, for_others=piece.for_others)
        return parts

    def _run(self, x: Tensor, piece: Piece, given: Mapping[str, Any]) -> list[Tensor]:
        """Tokens [n, H] through the module, as [1, n, H] or [n, 1, H]; states are read from their
        rows, and written."""
        states = self._states(piece)
        x = x[:, None] if len(piece.rows) > 1 else x[None]
        self.projections.begin(x, piece.tokens)
        with only_rows(piece.tokens):
            y, after = self.call(x, states, piece.begins, given)
        for pool, state in zip(self._pools, after, strict=True):
            stays = isinstance(state, StatesInRows)
            if not stays:
                pool.write(piece.rows, state)
            if piece.keeps is not None:
                state = pool.read(piece.rows) if stays else state
                (pool.keep if piece.for_others else pool.write)(piece.keeps, state)
        return y

    def _states(self, piece: Piece) -> list[Tensor]:
        """Copies of a piece's states, or what stands for them where they stay in their rows."""
        following = len(piece.tokens) == len(piece.rows) and not piece.begins
        return [
            pool.in_rows(piece.rows)
            if own.kind in self.in_rows and (following or own.kind == "recurrent")
            else pool.read(piece.rows)
            for own, pool in zip(self.shapes, self._pools, strict=True)
        ]

    def trial(self, x: Tensor, in_rows: Set[str]) -> list[Tensor]:
        """Of some tokens [T, H] at once and then two, one by one: what the module gives, and the
        states after them."""
        self.in_rows = in_rows
        self.keep(1, x.device)
        rows, found = torch.zeros(1, dtype=torch.int64, device=x.device), list[Tensor]()
        with quiet():
            for begin, end in pairwise((0, len(x) - 2, len(x) - 1, len(x))):
                tokens = torch.arange(begin, end, device=x.device)
                found += self._run(x[begin:end], Piece(tokens, rows, begins=not begin), {})
        found += [pool.read(rows) for pool in self._pools]
        self._pools = []
        return [part.float() for part in found]

    def call(
        self, x: Tensor, states: Sequence[Tensor], begins: bool, given: Mapping[str, Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The module's code on [B, n, H] after states [B, ...], which it may change: its first
        outputs [B, n, ...] of tokens, and the states then."""
        layer = LinearAttentionLayer(number_of_states=self._count)
        layer.device, layer.dtype = x.device, x.dtype
        for own, state in zip(self.shapes, states, strict=True):
            if begins and not isinstance(state, StatesInRows):
                state = torch.zeros_like(state)
            getattr(layer, f"{own.kind}_states")[own.index] = state
            getattr(layer, f"is_{own.kind}_states_initialized")[own.index] = True
            layer.has_previous_state[own.index] = not begins
            if own.kind == "conv":
                layer.conv_kernel_size[own.index] = state.shape[-1]
        out = self.mixer(x, **{**self._required, **given, self._argument: _cache(layer)})
        after = [getattr(layer, f"{own.kind}_states")[own.index] for own in self.shapes]
        self._values = len(out) if isinstance(out, tuple) else None
        values = out if isinstance(out, tuple) else (out,)
        of_tokens = takewhile(lambda y: y is not None and y.shape[:2] == x.shape[:2], values)
        return list(of_tokens)[: self.outputs], after


def _required(mixer: nn.Module) -> dict[str, None]:
    """Nothing for what a module's code must be given beside hidden states and a cache."""
    _, *others = inspect.signature(mixer.forward).parameters.values()
    skipped = (cache_argument(mixer), "args", "kwargs")
    must = (own.name for own in others if own.default is own.empty and own.name not in skipped)
    return dict.fromkeys(must)


def at_once(pairs: Sequence[tuple[int, int]], kept: int = 0) -> Iterator[Sequence[tuple[int, int]]]:
    """Pairs of rows to be copied one after the other, in runs that may be copied at once.

    Args:
        kept: First row of kept states: what a run copies is either from there on or before it.
    """
    written, start = set[int](), 0
    for i, pair in enumerate(pairs):
        other = (pair[0] >= kept) != (pairs[start][0] >= kept)
        if other or not written.isdisjoint(pair):
            yield pairs[start:i]
            written, start = set(), i
        written.add(pair[1])
    if pairs:
        yield pairs[start:]


def state_shapes(mixer: nn.Module, hidden: int, count: int, dtype: torch.dtype) -> list[StateShape]:
    """What a module's code keeps of a sequence.

    Args:
        mixer: On the meta device.
        hidden: Width of hidden states.
        count: How many states of each kind its cache may have.

    Raises:
        CheckpointError: it keeps none where transformers' caches have it.
    """
    layer = LinearAttentionLayer(number_of_states=count)
    x = torch.zeros(1, PROBED, hidden, dtype=dtype, device="meta")
    twin = copy.deepcopy(mixer).to(dtype)
    with torch.no_grad(), suppress(*FAULTS):  # of a cache that has not what its code asks of it
        twin(x, **_required(mixer), **{cast(str, cache_argument(mixer)): _cache(layer)})
    found = [
        StateShape(kind, index, tuple(state.shape[1:]), state.dtype)
        for kind in ("conv", "recurrent")
        for index, state in getattr(layer, f"{kind}_states").items()
        if state is not None
    ]
    if not found:
        raise CheckpointError(
            f"{type(mixer).__name__}: its code keeps its state otherwise than in a layer of "
            "transformers' cache; such a model is not run here"
        )
    return found


def stand_in(
    model: Any,
    names: Sequence[str],
    shapes: Mapping[str, list[StateShape]],
    *,
    same_bits: bool,
    functions: Mapping[str, Callable[..., Any]],
) -> None:
    """Put `Stateful` in the place of a loaded model's modules, and find out what each can do.

    Args:
        model: On its device.
        names: Of the modules.
        shapes: Of their states.
        same_bits: Whether a sequence's bits are to be the same beside others.
        functions: Of the backend, for those of these names in the code, where they give the same.

    Raises:
        CheckpointError: the code's tokens one by one are not what it computes of them at once.
    """
    known: dict[type, tuple[bool, bool, str | None, int | None]] = {}
    in_rows: dict[type, Set[str] | None] = {}
    for name in names:
        own = Stateful(model.get_submodule(name), shapes[name], states_of(model))
        rates = own.mixer._parameters.pop("A_log", None)  # whose exponential is asked for
        if rates is not None:
            own.mixer.register_buffer("A_log", Constant.of(rates), persistent=False)
        kind = type(own.mixer)
        if kind not in in_rows:
            in_rows[kind] = kinds_in_rows(own, functions, _drawn(own, model, 1)[0])
        kinds = in_rows[kind]
        if kinds is not None:
            own.in_rows = kinds
            vars(own.mixer).update(methods_with(own.mixer, functions))
        if kind not in known:
            known[kind] = (*_probed(own, name, model, same_bits), own.outputs)
        own.continues, own.together, last, own.outputs = known[kind]
        own.projections.settle(last)
        model.set_submodule(name, own)


def states_of(model: Any) -> int:
    """How many states of a kind a module may have, as transformers' caches are given."""
    return getattr(model.config.get_text_config(), "number_of_conv_states", 1)


def _drawn(own: Stateful, model: Any, many: int) -> Tensor:
    """Random hidden states of some sequences [many, PROBED, H] as a module takes them."""
    hidden = model.config.get_text_config().hidden_size
    x = torch.randn(many, PROBED, hidden, generator=torch.Generator().manual_seed(0))
    return x.to(next(own.parameters()).device, own.shapes[0].dtype)


def _zeros(own: Stateful, count: int, device: torch.device) -> list[Tensor]:
    """States of so many sequences before their first token."""
    return [torch.zeros(count, *s.shape, dtype=s.dtype, device=device) for s in own.shapes]


@torch.no_grad()
def _probed(own: Stateful, name: str, model: Any, same_bits: bool) -> tuple[bool, bool, str | None]:
    """Whether a module continues, takes several sequences, and its last layer's name."""
    makers, x = set[str | None](), _drawn(own, model, 3)
    device = x.device

    def run(x: Tensor, cuts: Sequence[int], forget: int | None = None) -> Tensor:
        states = _zeros(own, len(x), device)
        found, begins = [], True
        for part in x.split(cuts, dim=1):
            if forget is not None:
                states[forget] = torch.zeros_like(states[forget])
            y, states = own.call(part, states, begins, {})
            maker = own.projections.maker(y[0])
            makers.add(maker if len(y) == 1 else None)
            found.append(torch.cat([part.flatten(2).float() for part in y], dim=-1))
            begins = False
        return torch.cat(found, dim=1)

    ones = [1] * PROBED
    with quiet():
        some = [own.call(x[:1, :n], _zeros(own, 1, device), True, {})[0] for n in (1, PROBED)]
        own.outputs = min(map(len, some))
        single, whole = run(x[:1], ones), run(x[:1], [PROBED])
        cut = run(x[:1], [PROBED - 2, 2])
        forgot = [run(x[:1], [PROBED - 2, 2], forget=i) for i in range(len(own.shapes))]
        beside = run(x, ones)
        alone = torch.cat([run(one, ones) for one in x.split(1)])
    near = roundings(x.dtype)
    if (single - whole).norm() > near * whole.norm():
        raise CheckpointError(
            f"{name}: transformers' code computes other numbers of tokens one by one than of all "
            "at once; such a model is not run here"
        )
    off = (cut - whole).norm()  # next to nothing beside what forgetting a state costs
    continues = all(off < (other - whole).norm() / 8 for other in forgot)
    alike = (beside - alone).norm() <= near * alone.norm()
    together = torch.equal(beside, alone) if same_bits else bool(alike)
    return continues, together, makers.pop() if len(makers) == 1 else None
