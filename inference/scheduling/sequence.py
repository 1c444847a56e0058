"""The tokens of one request, and what a batch has to know of it beside them.

`Held` requests wait after each token for a client of the engine to choose the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import RequestError
from inference.scheduling.blocks import Beginning, blocks_for
from kernels.op_inputs import KV_BLOCK

if TYPE_CHECKING:
    from inference.scheduling.batch import RunningBatch


class Held(NamedTuple):
    """A request that is held.

    Attributes:
        max_tokens: Most tokens that it may have after its prompt: what was asked for, or what
            `max_model_len` leaves.
    """

    name: str
    max_tokens: int


def check_beams(beams: int, prompt: int, room: int, places: int, blocks: int) -> None:
    """Check that requests that are forked from one prompt can run together.

    Args:
        beams: How many they are; they share the whole blocks of the prompt.
        room: Most tokens of each after it.
        places: Of the batch.
        blocks: Of the cache.

    Raises:
        RequestError: they cannot, even if nothing else runs.
    """
    if beams > places:
        raise RequestError(
            f"beam_width: {beams} beams need as many places, but max_batch_size is {places}; ask "
            "for fewer beams, or raise it",
            "beam_width",
        )
    shared = prompt // KV_BLOCK
    needed = shared + beams * (blocks_for(prompt + room) - shared)
    if needed > blocks:
        raise RequestError(
            f"beam_width: {beams} beams of {room} tokens after a prompt of {prompt} may need "
            f"{needed} blocks of {KV_BLOCK} tokens, but the cache has {blocks}; lower beam_width "
            "or max_tokens, or raise kv_blocks",
            "beam_width",
        )


PENDING = -1  # a token that is being computed, and not known yet
NEVER = 2**62  # a length that no sequence reaches
MOST_EDITS = 512  # logits of a sequence that a device changes
MASKED_DRAFTS = 256  # drafts of constrained sequences in a step, each with a mask of its own


@dataclass(frozen=True)
class Draw:
    """How tokens are chosen: see `kernels.triton.sampling.sample.sample`, which names them so."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    log_min_p: float = -math.inf
    seeds: int = 0


@dataclass(frozen=True)
class Biases:
    """What is added to logits before a token is chosen, where a device chooses it.

    Attributes:
        tokens: Whose logits; at most `MOST_EDITS`.
        values: What is added to each.
        early: The first of them, and one more than the last, that count while the output has fewer
            than `until` tokens: those that forbid an end, and biases of other tokens.
        late: Likewise from then on: all biases.
        until: Least tokens of the output.
    """

    tokens: tuple[int, ...]
    values: tuple[float, ...]
    early: tuple[int, int]
    late: tuple[int, int]
    until: int


@dataclass(frozen=True)
class Terms:
    """What does not change while a sequence runs.

    Attributes:
        last: Most tokens that it has while it goes on; with one more it ends.
        ends: Tokens that end it.
        draw: How its tokens are chosen.
        host_until: Its tokens are chosen on the host while it has fewer than so many.
        greedy: Whether, from then on, the most likely token is chosen.
        watched: Whether each of its tokens has to be looked at.
        logprobs: How many of the likeliest tokens are given with each of its tokens; -1: none, and
            no log probability.
        biases: What is added to its logits on a device.
        masked: Whether a mask says which tokens may come: `Sequence.next_masks` does.
        adapter: Slot of the adapter that it runs with; -1 for none.
    """

    last: int = NEVER
    ends: tuple[int, ...] = ()
    draw: Draw = Draw()
    host_until: int = 0
    greedy: bool = True
    watched: bool = False
    logprobs: int = -1
    biases: Biases | None = None
    masked: bool = False
    adapter: int = -1


class Sequence:
    """Tokens of one request and how far they are computed.

    While it runs, both stand in its row of a `RunningBatch`; while it waits, here.

    Args:
        tokens: Those of its prompt.
        terms: What does not change while it runs.
        whole: Whether the logits of all its tokens are wanted, not only those of the last.
        given: Likewise.

    Attributes:
        prompt: Number of tokens of its prompt.
        preemptions: Times that it gave its blocks up.
        findable: Of how many of its first tokens what is cached may be used; None for all. The last
            of them is computed in any case: its logits are wanted.
        cacheable: Whether what its blocks hold are its tokens' K and V.
        beginning: What there was of its tokens when it was last looked up, while it waited.
        looked_up: What had been promised by then; see `BlockManager.promises`.
        promised: How many of its first tokens others can find as soon as they are computed.
        held: Whether a client chooses its tokens: it may be idle, and wait for others of its kind.
        places: Places that it keeps while it runs: its own, and those of what is forked from it.
        order: When it arrived, or what it was forked from; of preempted ones the first goes first.
        place: Its row, None while it waits.
        next_masks: Which tokens may come next and after drafts, where that is said; see
            `ActiveRequest.next_masks`.
        reference: Tokens of a text that it is expected to repeat in parts, for drafts.
        given: Number of its first tokens whose K and V its adapter gives; nothing is computed of
            them, and their ids say nothing.
    """

    def __init__(
        self,
        name: str,
        tokens: list[int],
        terms: Terms | None = None,
        *,
        whole: bool = False,
        held: bool = False,
        given: int = 0,
    ) -> None:
        self.given = given
        self.name, self.prompt, self.terms = name, len(tokens), terms or Terms()
        self.preemptions = self.promised = 0
        self.cacheable, self.held = True, held
        self.findable: int | None = None
        self.places, self.order = 1, 0
        self.beginning, self.looked_up = Beginning(), -1
        self._tokens, self._times, self._computed, self._whole = tokens, [], 0, whole
        self._row: tuple[RunningBatch, int] | None = None  # the batch, and `place`
        self.place: int | None = None
        self.next_masks: Callable[[Items[int]], list[NDArray[np.int32]]] | None = None
        self.reference: list[int] = []

    def __len__(self) -> int:
        row = self._row
        return len(self._tokens) if row is None else int(row[0].length[row[1]])

    def __bool__(self) -> bool:
        return True

    @property
    def tokens(self) -> list[int]:
        """Prompt and output; the last may be `PENDING`. While it runs, a copy."""
        if (row := self._row) is None:
            return self._tokens
        batch, place = row
        return batch.ids[place, : batch.length[place]].tolist()

    @property
    def computed(self) -> int:
        """Number of tokens whose K and V are in the cache."""
        row = self._row
        return self._computed if row is None else int(row[0].computed[row[1]])

    @computed.setter
    def computed(self, count: int) -> None:
        if (row := self._row) is None:
            self._computed = count
        else:
            row[0].computed[row[1]] = count

    @property
    def known(self) -> int:
        """Number of tokens that are not pending."""
        row = self._row
        return len(self._tokens) if row is None else int(row[0].known[row[1]])

    @property
    def seen(self) -> int:
        """Tokens whose K and V have given logits that were looked at: all before the newest."""
        return self.known - 1 if self.known > self.prompt else 0

    @property
    def whole(self) -> bool:
        """Whether the logits of all its tokens are wanted, not only those of the last."""
        return self._whole

    @whole.setter
    def whole(self, wanted: bool) -> None:
        self._whole = wanted
        if (row := self._row) is not None:
            row[0].whole[row[1]] = wanted

    def append(self, *tokens: int) -> None:
        """Take known tokens, such as those that another sequence begins with."""
        if (row := self._row) is None:
            self._tokens.extend(tokens)
        else:
            row[0].append(row[1], tokens)

    def fork(self, name: str) -> Sequence:
        """Another one with the same tokens, of which nothing is computed yet."""
        other = Sequence(
            name, self.known_from(0), self.terms, whole=self.whole, held=self.held, given=self.given
        )
        other.prompt, other.findable, other.cacheable = self.prompt, self.findable, self.cacheable
        other.order, other.reference = self.order, self.reference
        return other

    def known_from(self, start: int) -> list[int]:
        """Its tokens from an index on, those that are known."""
        if (row := self._row) is None:
            return self._tokens[start:]
        batch, place = row
        return batch.ids[place, start : batch.known[place]].tolist()

    def times_from(self, start: int) -> list[float]:
        """When the tokens of its output from a number on were there, seconds."""
        if (row := self._row) is None:
            return self._times[start:]
        batch, place = row
        return batch.times[place, self.prompt + start : batch.known[place]].tolist()

    def enter(self, batch: RunningBatch, place: int) -> None:
        """Keep the tokens in a row from now on; called by the batch, which copies them."""
        self._row, self.place = (batch, place), place

    def leave(self) -> None:
        """Keep the tokens here from now on; those that are not known yet are forgotten."""
        tokens, times, computed = self.known_from(0), self.times_from(0), self.computed
        self._row = self.place = None
        self._tokens, self._times, self._computed = tokens, times, computed
