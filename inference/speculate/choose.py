"""The source of drafts that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from formats.errors import EngineError
from inference.backend import Backend
from inference.config import SpeculateConfig
from inference.speculate.chain import Target
from inference.speculate.draft import DraftModel
from inference.speculate.eagle.head import eagle_proposer
from inference.speculate.mtp import mtp_proposer
from inference.speculate.ngram import NGramProposer
from inference.speculate.proposer import Proposer
from inference.speculate.suffix import SuffixProposer

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
