"""Layers of a decoder: those that a device makes of what was read, and feed-forward layers of them.

Gated MLPs (SwiGLU, GEGLU: Shazeer 2020, arXiv 2002.05202, Eq. 6) have gate and up merged. A mixture
of experts (Shazeer et al. 2017, arXiv 1701.06538; Jiang et al. 2024, "Mixtral of Experts", arXiv
2401.04088):

    s = softmax(x W_router^T)        y = f * sum over the k largest s_i of s_i E_i(x)

with s divided by the sum of the chosen ones where the family does so, and a factor f. s may be the
logits' sigmoid, experts may be chosen by s + b instead, and out of some groups only (DeepSeek-AI
2024, arXiv 2412.19437, Eq. 12 to 16). Qwen2-MoE adds an expert that sees every token, y +=
sigmoid(x W_shared^T) E_shared(x) (Qwen Team 2024, arXiv 2407.10671), DeepSeek one without a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from inference.models.config import ModelConfig, Routing
from inference.models.read import StoredLinear
from kernels.op_inputs import Activation


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


E = TypeVar("E")


@dataclass(frozen=True)
class GatedMLP(Generic[L]):
    """down(activation(gate(x)) * up(x)); gate and up are merged."""

    gate_up: L
    down: L
    activation: Activation

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.gate_up.nbytes + self.down.nbytes


@dataclass(frozen=True)
class MixtureOfExperts(Generic[L, X]):
    """Experts, of which each token goes to some; see the module's docstring.

    Attributes:
        routing: How experts are chosen.
        router: Gives a logit for each expert.
        gate_up: Gate and up, merged, of each expert, in the router's order.
        down: Down of each expert.
        shared: Sees every token, or None.
        shared_gate: Gives its logit; None where it counts fully.
        activation: Of the experts.
        correction: fp32 [experts], added to scores where experts are chosen, or None.
    """

    routing: Routing
    router: L
    gate_up: X
    down: X
    shared: GatedMLP[L] | None
    shared_gate: L | None
    activation: Activation
    correction: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        parts = (self.router, self.gate_up, self.down, self.shared, self.shared_gate)
        return sum(part.nbytes for part in parts if part is not None)


FeedForward = GatedMLP[L] | MixtureOfExperts[L, X]


def by_expert(
    x: Tensor, chosen: Tensor, experts: Sequence[E], run: Callable[[E, Tensor], Tensor]
) -> Tensor:
    """What each token's experts make of it, one expert after another.

    Tokens are sorted by expert, so that every expert is `run` at most once.

    Args:
        x: [T, H].
        chosen: int64 [T, k], the experts of each token.
        run: Runs one on some tokens, int64 [n]: [n, H].

    Returns:
        [T, k, H].
    """
    each = chosen.flatten()
    order = torch.argsort(each, stable=True)  # rows of [T k], expert by expert
    counts = torch.bincount(each, minlength=len(experts)).tolist()
    outputs = x.new_empty(len(each), x.shape[-1])
    for expert, rows in zip(experts, order.split(counts), strict=True):
        if len(rows):
            outputs[rows] = run(expert, rows // chosen.shape[1])
    return outputs.unflatten(0, chosen.shape)


def sum_in_order(outputs: Tensor, weights: Tensor) -> Tensor:
    """What experts give [T, k, H], weighted [T, k] and added one after the other: [T, H].

    So a token's bits do not depend on the batch; a sum of torch's may take any order.
    """
    y = outputs[:, 0] * weights[:, :1]
    for i in range(1, outputs.shape[1]):
        y = y + outputs[:, i] * weights[:, i : i + 1]
    return y
