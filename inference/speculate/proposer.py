"""What proposes drafts: the next tokens of running sequences, guessed before they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from inference.scheduling.batch import Ints, RunningBatch
from inference.scheduling.blocks import BlockChanges
from inference.scheduling.drafter import HiddenStates
from inference.scheduling.work import Work


class Proposer(Protocol):
    """Says how sequences may go on; whatever it says, the tokens are the same."""

    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        """Write drafts of running sequences to `batch.ids[place, known:]`.

        Args:
            batch: The running sequences; everything but `ids` behind `known` is only read.
            places: Whose next tokens; all their known tokens but the last are computed, and they
                have blocks for `most` tokens more.
            most: Most drafts of each, at least 1.

        Returns:
            How many there are of each, 0 to `most`.
        """
        ...

    def note_end(self, tokens: Sequence[int], prompt: int) -> None:
        """A request ended, not by an error.

        Args:
            tokens: Its tokens.
            prompt: How many of them, the first, are its prompt's.
        """
        ...


@runtime_checkable
class HiddenStateProposer(Proposer, Protocol):
    """A proposer that reads hidden states of the model that it drafts for.

    Attributes:
        reads: Which ones.
    """

    reads: HiddenStates

    def note_hidden(self, work: Work) -> None:
        """Hidden states of a step's tokens were given to `reads.keep`.

        Args:
            work: Tokens that are known, of sequences that are still at their places.
        """
        ...

    def note_changes(self, changes: BlockChanges) -> None:
        """Blocks of the model's cache were copied, before the next step is computed."""
        ...
