"""Feed-forward layers of a decoder block: one SwiGLU, or a mixture of them.

SwiGLU (Shazeer 2020, arXiv 2002.05202, Eq. 6) with gate and up merged. A mixture of experts
(Shazeer et al. 2017, arXiv 1701.06538; Jiang et al. 2024, "Mixtral of Experts", arXiv 2401.04088):

    p = softmax(x W_router^T)        y = sum over the k largest p_i of p_i E_i(x)

with p divided by the sum of the chosen ones where the family does so. Qwen2-MoE adds an expert that
sees every token: y += sigmoid(x W_shared^T) E_shared(x) (Qwen Team 2024, arXiv 2407.10671).

Tokens are sorted by expert, and each expert runs once on its rows. All that is added up of a token
is added in the order of its own probabilities, so that its bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.experts import EXPERT_NAMES
from inference.models.layers import Linear, Placement, load_linear, load_stacks
from kernels.ops import silu_mul

if TYPE_CHECKING:
    from inference.gpu.experts import GpuExperts
    from inference.gpu.layers import GpuLinear


@dataclass(frozen=True)
class Routing:
    """How a family's routers choose.

    Attributes:
        experts: How many there are in a block.
        chosen: How many of them a token goes to.
        normalized: Whether the probabilities of these are divided by their sum.
    """

    experts: int
    chosen: int
    normalized: bool


@dataclass(frozen=True)
class SwiGLU:
    """down(silu(gate(x)) * up(x)); gate and up are merged."""

    gate_up: Linear | GpuLinear
    down: Linear | GpuLinear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] to the same."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu_mul(gate, up))

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.gate_up.nbytes + self.down.nbytes


@dataclass(frozen=True)
class MixtureOfExperts:
    """Experts, of which each token goes to some; see the module's docstring.

    Attributes:
        routing: How experts are chosen.
        router: Gives a logit for each expert.
        experts: In the router's order.
        shared: Sees every token, or None.
        shared_gate: Gives its logit.
        gate_up: On a GPU all experts' as one, or None.
        down: Likewise.
    """

    routing: Routing
    router: Linear | GpuLinear
    experts: Sequence[SwiGLU]
    shared: SwiGLU | None
    shared_gate: Linear | GpuLinear | None
    gate_up: GpuExperts | None = None
    down: GpuExperts | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] to the same."""
        weights, chosen = self.route(x)
        outputs = self.by_expert(x, chosen, SwiGLU.__call__)  # [T, k, H]
        y = outputs[:, 0] * weights[:, :1]
        for i in range(1, self.routing.chosen):  # in order: a sum of torch's may take any
            y = y + outputs[:, i] * weights[:, i : i + 1]
        if self.shared is not None and self.shared_gate is not None:
            share = 1.0 / (1.0 + torch.exp(-self.shared_gate(x).float()))
            y = y + self.shared(x) * share
        return y.to(x.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities fp32 and numbers int64 of each token's experts, both [T, k], descending."""
        probabilities = torch.softmax(self.router(x).float(), dim=-1)
        weights, chosen = torch.topk(probabilities, self.routing.chosen, dim=-1)
        if self.routing.normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen

    def by_expert(
        self, x: Tensor, chosen: Tensor, run: Callable[[SwiGLU, Tensor], Tensor]
    ) -> Tensor:
        """Output of each of the tokens' experts [T, k, H]; every expert is `run` at most once."""
        each = chosen.flatten()
        order = torch.argsort(each, stable=True)  # rows of [T k], expert by expert
        counts = torch.bincount(each, minlength=len(self.experts)).tolist()
        outputs = x.new_empty(len(each), x.shape[-1])
        for expert, rows in zip(self.experts, order.split(counts), strict=True):
            if len(rows):
                outputs[rows] = run(expert, x[rows // self.routing.chosen])
        return outputs.unflatten(0, chosen.shape)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        parts = (self.router, *self.experts, self.shared, self.shared_gate)
        return sum(part.nbytes for part in parts if part is not None)


FeedForward = SwiGLU | MixtureOfExperts


def load_feed_forward(
    checkpoint: Checkpoint,
    block: str,
    routing: Routing | None,
    place: Placement,
) -> FeedForward:
    """Read the feed-forward layer of a block; it is a mixture if the checkpoint has its router.

    Args:
        checkpoint: Where from.
        block: Full name.
        routing: How the family's routers choose; None for dense families.
        place: Where to.

    Raises:
        CheckpointError: a tensor is missing, or the router is not one of these experts.
    """

    def linear(*modules: str) -> Linear | GpuLinear:
        return load_linear(checkpoint, modules, place)

    def swiglu(module: str, gate: str, up: str, down: str) -> SwiGLU:
        return SwiGLU(linear(f"{module}.{gate}", f"{module}.{up}"), linear(f"{module}.{down}"))

    dense = ("gate_proj", "up_proj", "down_proj")
    names = EXPERT_NAMES.get(checkpoint.config["model_type"])
    if routing is None or names is None or f"{block}.{names.layer}.gate.weight" not in checkpoint:
        return swiglu(f"{block}.mlp", *dense)
    moe = f"{block}.{names.layer}"
    found = checkpoint.shape(f"{moe}.gate.weight")[0]
    if found != routing.experts:
        raise CheckpointError(
            f"{moe}.gate chooses among {found} experts, config.json says {routing.experts}. The "
            "checkpoint and its config.json do not belong together"
        )
    experts = [f"{moe}.experts.{i}" for i in range(found)]
    (gate_ups, gate_up), (downs, down) = (
        _load_alike(checkpoint, [[f"{e}.{leaf}" for leaf in leaves] for e in experts], place)
        for leaves in ((names.gate, names.up), (names.down,))
    )
    shared = f"{moe}.shared_expert_gate.weight" in checkpoint
    return MixtureOfExperts(
        routing=routing,
        router=linear(f"{moe}.gate"),
        experts=[SwiGLU(*pair) for pair in zip(gate_ups, downs, strict=True)],
        shared=swiglu(f"{moe}.shared_expert", *dense) if shared else None,
        shared_gate=linear(f"{moe}.shared_expert_gate") if shared else None,
        gate_up=gate_up,
        down=down,
    )


def _load_alike(
    checkpoint: Checkpoint, layers: Sequence[Sequence[str]], place: Placement
) -> tuple[Sequence[Linear | GpuLinear], GpuExperts | None]:
    """The same layer of all experts: each, and on a GPU all as one, where that can be."""
    if not place.triton:
        return [load_linear(checkpoint, modules, place) for modules in layers], None
    from inference.gpu.experts import side_by_side

    name = f"{layers[0][0]} and {len(layers) - 1} more"
    return side_by_side(load_stacks(checkpoint, layers, place), len(layers), name)
