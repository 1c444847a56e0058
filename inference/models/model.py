"""What the engine asks of a loaded model, whoever's code runs it, and of small networks that draft.

A chain (`inference.cpu.backend`, `inference.gpu.chain`) first computes what the network's cache
lacks of some sequences, as a rule the tokens chosen since it drafted last. The logits of the last
of them give the first drafts, and a step of one token a sequence each of the further ones.

A draft is what the model would choose with these logits and the same noise, without penalties,
biases and masks: equal logits give equal tokens, and similar ones mostly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor

from inference.scheduling.batch import Bools, Ints, RunningBatch
from kernels.op_inputs import KVPool


@dataclass(frozen=True)
class KVHeads:
    """The keys and values of one token in one layer.

    Attributes:
        count: Heads of K, and of V.
        k_size: Numbers of a head of K.
        v_size: Numbers of a head of V.
        channels: Places of the numbers of a head of K in what static scales are stored for, in the
            order in which the cache holds them; None where they are alike.
        latent: Whether "K" is the rotated part of the keys and "V" the latent of latent attention.
    """

    count: int
    k_size: int
    v_size: int
    channels: tuple[int, ...] | None = None
    latent: bool = False


class ModelShape(Protocol):
    """What there is to know of a model before its weights are read."""

    @property
    def max_positions(self) -> int:
        """Most tokens of a sequence."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of hidden states."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below."""
        ...

    @property
    def attention_span(self) -> float:
        """Tokens in the cache for which attention takes as long as all else, roughly."""
        ...

    @property
    def cached(self) -> Sequence[KVHeads]:
        """What the cache holds of a token, layer by layer."""
        ...


class Model(Protocol):
    """A loaded model: `inference.models.decoder`, or transformers' own code."""

    @property
    def config(self) -> ModelShape:
        """Its shape."""
        ...

    @property
    def layers(self) -> Sequence[Any]:
        """Its blocks, which models of one kind and shape may exchange."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        ...

    def with_layers(self, layers: Sequence[Any]) -> Self:
        """This model with other blocks, as many and of the same shape."""
        ...


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
            (`inference.transformers_code.state_rows.Piece`): of a batch, places, starts and counts,
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


class Chain(Protocol):
    """Runs a network over sequences."""

    def draft(
        self, batch: RunningBatch, places: Ints, starts: Ints, most: Ints
    ) -> tuple[Ints, Bools]:
        """Write drafts to `batch.ids`, after what is known.

        Args:
            batch: The sequences.
            places: Which of them get drafts.
            starts: How many tokens of each the network's cache holds.
            most: Most drafts of each, at least one.

        Returns:
            How many there are of each sequence, and of which the logits were not finite: these
            have those before.
        """
        ...
