"""What the scheduler asks for drafts: tokens that may come next, computed before it is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from inference.scheduling.batch import Ints, RunningBatch
from inference.scheduling.blocks import BlockChanges
from inference.scheduling.work import Work

if TYPE_CHECKING:
    from torch import Tensor, dtype


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states of a step that are wanted: of each token, what some blocks read.

    Attributes:
        blocks: Which ones; the number of the model's blocks stands for the output of the last.
        size: Numbers of each.
        dtype: Their type.
        keep: Takes them on the device, as a part of the step: hidden states [T, blocks, size] and
            the cache's slots int64 [T]; negative for rows that stand for no token.
    """

    blocks: tuple[int, ...]
    size: int
    dtype: dtype
    keep: Callable[[Tensor, Tensor], None]


class Drafter(Protocol):
    """Drafts for running sequences; `inference.speculate.decoder.SpeculativeDecoder`.

    Attributes:
        reads: Hidden states of each step that it is given, if any.
    """

    reads: HiddenStates | None

    def wants(self, sequences: int) -> bool:
        """Whether the next step may have drafts; it is planned with all tokens known then.

        Args:
            sequences: How many run.
        """
        ...

    def plan(self, batch: RunningBatch, places: Ints, most: Ints, room: int) -> Ints:
        """How many drafts each sequence is to have in a step; blocks are taken for so many.

        It is called for every step that may have drafts, and where no sequence can, with none.

        Args:
            places: Those of which all tokens are known, and all but the last computed.
            most: Most drafts of each: what it may still come to have, less one.
            room: Most drafts of all.
        """
        ...

    def plan_ahead(self, batch: RunningBatch, places: Ints, most: Ints, room: int) -> Ints:
        """As `plan`, for the step after one that still runs.

        Nothing is noted: the step may be planned again when that one has ended.
        """
        ...

    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        """Write drafts to `batch.ids`, after what is known; how many there are of each.

        Args:
            places: Who gets drafts.
            most: Most of each, at least one.
        """
        ...

    def note_accepted(self, batch: RunningBatch, work: Work, which: Ints, accepted: Ints) -> None:
        """Learn which drafts were accepted.

        Args:
            batch: The sequences; some may have ended since.
            which: Indices of its slices that had drafts and whose first new token was chosen.
            accepted: How many of each one's drafts were.
        """
        ...

    def note_time(self, work: Work, seconds: float) -> None:
        """Learn how long a step took, drafting included; noted of every step, in their order."""
        ...

    def learn_times(self, measure: Callable[[], Mapping[int, float]]) -> None:
        """Learn at the start what steps take whose attention reads nothing.

        Args:
            measure: Gives seconds by rows, a step of fewer being padded to the next of these; it
                takes a while, and is called only where they are used.
        """
        ...

    def note_hidden(self, work: Work) -> None:
        """Learn that hidden states of a step's tokens, all known by now, were given to `keep`.

        Its sequences are still at their places.
        """
        ...

    def note_changes(self, changes: BlockChanges) -> None:
        """Blocks of the cache were copied, those that were to be."""
        ...

    def note_end(self, tokens: Sequence[int], prompt: int) -> None:
        """A request ended, and not by an error: its tokens, the first `prompt` its prompt's."""
        ...
