"""What the engine asks of a loaded model, whoever's code runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self


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
