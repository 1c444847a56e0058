"""What a decoder asks of the device that it is loaded on: layers made of what was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from inference.models.config import ModelConfig
from inference.models.read import StoredLinear


class LinearLayer(Protocol):
    """A linear layer as a backend holds it; how it is run is between the backend's own parts."""

    def __call__(self, x: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[T, K] float -> [T, N] in the type of `x`.

        Args:
            x: Rows.
            sinks: bool [T], which of them are of sink tokens; None where none is.
        """
        ...

    @property
    def gathers(self) -> bool:
        """Whether `gather` gives rows of the weight as it is in memory."""
        ...

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight as floats, which a head may be read by: [T, K] of ids int64 [T]."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        ...

    @property
    def matrix(self) -> Tensor | None:
        """The weight [N, K], where it is in memory as that; a tied embedding is this tensor."""
        ...


class ExpertLayers(Protocol):
    """The same linear layer of each expert of a mixture, as a backend holds them."""

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        ...


L = TypeVar("L", bound=LinearLayer)
X = TypeVar("X", bound=ExpertLayers)
L_co = TypeVar("L_co", bound=LinearLayer, covariant=True)
X_co = TypeVar("X_co", bound=ExpertLayers, covariant=True)


class LayerFactory(Protocol[L_co, X_co]):
    """Makes the layers of a decoder; the part of a backend that loading needs."""

    @property
    def device(self) -> torch.device:
        """Where tensors go."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations and of float weights."""
        ...

    @property
    def same_bits(self) -> bool:
        """Whether a row has the same bits in any batch."""
        ...

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """What kernels compute of layers that keep a state, by its name in transformers' code."""
        ...

    def check(self, config: ModelConfig) -> None:
        """Refuse a decoder that these kernels do not run, before its weights are read.

        Raises:
            CheckpointError: it has a part that they do not take.
        """
        ...

    def linear(self, stored: StoredLinear) -> L_co:
        """Lay a linear layer out for the kernel that takes it."""
        ...

    def experts(self, stacks: Iterator[StoredLinear], count: int) -> X_co:
        """Lay the same layer of `count` experts out; they come in stacks of some of them."""
        ...
