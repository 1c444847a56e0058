"""Small networks that draft: what they are to the chains that run them, on any device.

A chain (`inference.cpu.chain`, `inference.gpu.chain`) first computes what the network's cache lacks
of some sequences, as a rule the tokens chosen since it drafted last. The logits of the last of
them give the first drafts, and a step of one token a sequence each of the further ones.

A draft is what the model would choose with these logits and the same noise, without penalties,
biases and masks: equal logits give equal tokens, and similar ones mostly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from inference.scheduling.batch import Bools, Ints, RunningBatch
from kernels.attention_inputs import KVPool


class Computed(NamedTuple):
    """What a network has computed at some tokens.

    Attributes:
        logits: fp32 [R, vocabulary] of the tokens that come next.
        hidden: What it reads again to go on [R, size]; None where it reads tokens alone.
    """

    logits: Tensor
    hidden: Tensor | None


class Network(Protocol):
    """A network on a device.

    Attributes:
        longest: Most tokens of a sequence in its cache.
        shift: Tokens after a cached one that what is cached of it depends on: position t reads
            the id of token t + shift.
        size: Numbers that it reads of each token beside its id; 0 where that is all.
        captured: Whether a GPU may capture its steps.
        pieces: Gives tokens as modules that keep a state take them
            (`inference.transformers_code.pieces.Piece`): of a batch, places, starts and counts,
            and whether pieces are to be as long as can be. None where it keeps no state.
    """

    longest: int
    shift: int
    size: int
    captured: bool
    pieces: Callable[..., Sequence[Any]] | None = None

    def step(self, batch: Any, pools: Sequence[KVPool], hidden: Tensor | None) -> Computed:
        """Compute tokens; their K and V go into its cache.

        Args:
            batch: Which ones: the `Batch` or `GpuBatch` of its device, with the ids that it reads.
            hidden: [T, size] of the tokens, if it reads that.

        Returns:
            What it says at `batch.rows`.
        """
        ...


@dataclass(frozen=True)
class Catching:
    """Sequences that get drafts, and what is to be computed for them first.

    Attributes:
        starts: How many tokens of each the network's cache holds.
        most: Most drafts of each, at least one.
    """

    batch: RunningBatch
    places: Ints
    starts: Ints
    most: Ints


class Chain(Protocol):
    """Runs a network over sequences."""

    def draft(self, wanted: Catching) -> tuple[Ints, Bools]:
        """Write drafts to `batch.ids`, after what is known.

        Returns:
            How many there are of each sequence, and of which the logits were not finite: these
            have those before.
        """
        ...
