"""The source of drafts that a configuration asks for.

What proposes drafts: the next tokens of running sequences, guessed before they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from formats.errors import EngineError
from inference.backend import Backend
from inference.config import SpeculateConfig
from inference.scheduling.batch import Ints, RunningBatch
from inference.scheduling.blocks import BlockChanges
from inference.scheduling.drafter import HiddenStates
from inference.scheduling.work import Work
from inference.speculate.chain import Target
from inference.speculate.draft import DraftModel
from inference.speculate.eagle.head import eagle_proposer
from inference.speculate.mtp import mtp_proposer
from inference.speculate.ngram import NGramProposer
from inference.speculate.suffix import SuffixProposer


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


TEXT_PROPOSERS: dict[str, Callable[[], Proposer]] = {  # those that read tokens alone
    "ngram": NGramProposer,
    "suffix": SuffixProposer,
}
NETWORK_PROPOSERS: dict[str, Callable[[str, Target], Proposer]] = {
    "draft": DraftModel,
    "eagle": eagle_proposer,
}


def require_method(config: SpeculateConfig, backend: Backend[Any, Any]) -> None:
    """Check, before anything is loaded, that a backend runs what drafts.

    Raises:
        EngineError: they do not.
    """
    if config.method not in TEXT_PROPOSERS and not backend.runs_drafters:
        allowed = " or ".join(TEXT_PROPOSERS)
        raise EngineError(
            f"speculate: found {config.method}, which runs a network beside the model; an engine "
            f"of several ranks drafts by {allowed}. Ask for one of them, or for one rank "
            "(tensor_parallel 1)"
        )


def choose_proposer(config: SpeculateConfig, target: Target) -> Proposer:
    """Make a proposer.

    Args:
        config: Says which.
        target: What drafts are for.

    Raises:
        CheckpointError: a draft model or head is damaged, or of a kind that is not run here.
        EngineError: it does not fit the target.
    """
    if config.method == "mtp":
        return mtp_proposer(config.path, target)
    if config.path is None:
        return TEXT_PROPOSERS[config.method]()
    return NETWORK_PROPOSERS[config.method](config.path, target)
