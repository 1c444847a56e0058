"""Feed-forward layers as families declare them: gated MLPs, and mixtures of them as experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GatedMLP:
    """down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202, Eq. 6): SwiGLU, GEGLU.

    Attributes:
        gate: Name of the gate projection.
        up: Name of the up projection.
        down: Name of the down projection.
        merged: Name of gate and up as one layer, for runtimes that multiply them at once.
        stored_merged: Whether checkpoints hold that one layer in place of the two.
        activation_setting: Key of config.json that names the activation.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    merged: str = "gate_up_proj"
    stored_merged: bool = False
    activation_setting: str = "hidden_act"

    @property
    def gate_up(self) -> tuple[str, str]:
        """Names of the projections that read its input, in the order they merge."""
        return self.gate, self.up


@dataclass(frozen=True)
class ExpertGroups:
    """Experts in groups of neighbours: only those of a token's best groups can be chosen.

    Attributes:
        best: How many of a group's best scores are added up to its own.
        count: Key of config.json that says how many groups there are.
        chosen: Key of config.json that says of how many a token's experts are.
        only_if: Key of config.json and the value of it with which there are groups; None where
            there always are.
    """

    best: int
    count: str = "n_group"
    chosen: str = "topk_group"
    only_if: tuple[str, str] | None = None


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in the place of the feed-forward layer, in some or all blocks.

    Attributes:
        module: Name of the module that holds router and experts, as checkpoints name it.
        expert: Names of an expert's layers.
        count: Key of config.json that says how many experts a block has.
        router: Name of the layer that gives each expert a logit.
        normalized: Whether the chosen experts' scores are divided by their sum: always or never,
            or as this key of config.json says.
        shared: Name of the expert that sees every token, if there is one; named as a dense layer.
        shared_gate: Name of the layer that gives its logit; None where it counts fully.
        scores: What makes an expert's score of its logit: softmax over all, or its sigmoid.
        correction: Name of the router's tensor with a bias for each expert, which is added to its
            score where experts and groups are chosen and not where they are weighed (auxiliary-
            loss-free balancing, Wang et al. 2024, arXiv 2408.15664); None without one.
        groups: How experts are grouped; None where all can be chosen together.
        factor: Key of config.json of what the chosen experts' weights are multiplied by.
        alternating: Whether experts lie in 3-D parameters [E, inputs, outputs] with a bias each, in
            which outputs of gate and up alternate (gpt-oss), not one by one or gate above up.
        clamped: Keys of config.json, with their defaults, of the slope a and the bound c of
            min(g, c) sigmoid(a min(g, c)) (clip(u, -c, c) + 1), of an expert's gate g and up u
            (gpt-oss); None where experts multiply as dense layers do.
    """

    module: str
    expert: GatedMLP
    count: str
    normalized: bool | str
    router: str = "gate"
    shared: str | None = None
    shared_gate: str | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"
    correction: str | None = None
    groups: ExpertGroups | None = None
    factor: str | None = None
    alternating: bool = False
    clamped: tuple[tuple[str, float], tuple[str, float]] | None = None

    @property
    def routers(self) -> tuple[str, ...]:
        """Names of the layers that say how much an expert counts."""
        return (self.router, *((self.shared_gate,) if self.shared_gate else ()))
