"""Feed-forward layers of a decoder block: a gated MLP, or a mixture of them.

Gated MLPs (SwiGLU, GEGLU: Shazeer 2020, arXiv 2002.05202, Eq. 6) with gate and up merged. A
mixture of experts
(Shazeer et al. 2017, arXiv 1701.06538; Jiang et al. 2024, "Mixtral of Experts", arXiv 2401.04088):

    s = softmax(x W_router^T)        y = f * sum over the k largest s_i of s_i E_i(x)

with s divided by the sum of the chosen ones where the family does so, and a factor f. s may be the
logits' sigmoid, experts may be chosen by s + b instead, and out of some groups only (DeepSeek-AI
2024, arXiv 2412.19437, Eq. 12 to 16). Qwen2-MoE adds an expert that sees every token, y +=
sigmoid(x W_shared^T) E_shared(x) (Qwen Team 2024, arXiv 2407.10671), DeepSeek one without a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from inference.models.config import Routing
from inference.models.layers import L, X
from kernels.activations import Activation

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
