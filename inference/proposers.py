"""Proposers: they draft the next tokens of running sequences before these are computed.

Every module of `inference.speculate.methods` registers one by its `METHOD`; it imports what runs a
network when one is made, so that arguments are checked without torch.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from formats.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from inference.scheduling.batch import Ints, RunningBatch
    from inference.scheduling.blocks import BlockChanges
    from inference.scheduling.work import Work

FOLDER = "inference.speculate.methods"


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


class Proposer(Protocol):
    """Says how sequences may go on; whatever it says, the tokens are the same.

    Attributes:
        reads: Hidden states of the model that it reads; None where it reads tokens alone.
    """

    reads: HiddenStates | None = None

    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        """Write drafts of running sequences to `batch.ids[place, known:]`.

        Args:
            batch: The running sequences; everything but `ids` after `known` is only read.
            places: Slots whose next tokens are drafted; all their known tokens but the last are
                computed, and they have blocks for `most` tokens more.
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

    def note_hidden(self, work: Work) -> None:
        """Hidden states of a step's tokens were given to `reads.keep`.

        Args:
            work: Tokens that are known, of sequences that are still at their places.
        """

    def note_changes(self, changes: BlockChanges) -> None:
        """Blocks of the model's cache were copied, before the next step is computed."""


@dataclass(frozen=True)
class DraftMethod:
    """A proposer that a configuration may ask for.

    Attributes:
        name: What it is asked for by.
        make: Makes it, of the path, or None without one, and of the
            `inference.speculate.chain.Target` that it drafts for. Raises CheckpointError where
            a draft model or head is damaged or of a kind that is not run here, and EngineError
            where it does not fit the target.
        needs: What the path names that it needs; None where it needs none.
        takes_path: Whether it may have a path that it does not need.
        network: Whether it runs a network beside the model.
    """

    name: str
    make: Callable[[str | None, Any], Proposer]
    needs: str | None = None
    takes_path: bool = False
    network: bool = False


@cache
def draft_methods() -> Mapping[str, DraftMethod]:
    """All proposers by name: those that read tokens alone, then those that run networks."""
    names = [module.name for module in pkgutil.iter_modules(import_module(FOLDER).__path__)]
    found: list[DraftMethod] = [import_module(f"{FOLDER}.{name}").METHOD for name in names]
    return {own.name: own for own in sorted(found, key=lambda own: (own.network, own.name))}


def require_method(name: str, *, networks: bool) -> None:
    """Check, before anything is loaded, that a backend runs what drafts.

    Args:
        name: Of the proposer.
        networks: Whether the backend runs networks that draft (`Backend.runs_drafters`).

    Raises:
        EngineError: it does not.
    """
    methods = draft_methods()
    if methods[name].network and not networks:
        allowed = " or ".join(own.name for own in methods.values() if not own.network)
        raise EngineError(
            f"speculate: found {name}, which runs a network beside the model; an engine "
            f"of several ranks drafts by {allowed}. Ask for one of them, or for one rank "
            "(tensor_parallel 1)"
        )
