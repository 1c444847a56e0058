"""Groups of layers that must share a scheme, because they are multiplied as one."""

from __future__ import annotations

from dataclasses import dataclass

from formats.families.names import expert_of
from ptq.plan.modules import ModulePlan
from ptq.plan.plan import Plan


@dataclass(frozen=True)
class Group:
    """Layers with one scheme.

    Attributes:
        label: Full name of what they become, such as `model.layers.0.self_attn.qkv_proj`.
        layers: They, in the model's order.
    """

    label: str
    layers: tuple[ModulePlan, ...]


def groups_of(plan: Plan) -> list[Group]:
    """The layers that are quantized, in groups, in the model's order.

    Layers that are merged at run time are one group, and so are all experts of a block, whose
    products run together.
    """
    found: dict[str, list[ModulePlan]] = {}
    for module in plan.modules:
        if module.action == "quantize":
            found.setdefault(_label(module), []).append(module)
    return [Group(label, tuple(layers)) for label, layers in found.items()]


def _label(module: ModulePlan) -> str:
    if expert_of(module.name) is not None:
        return f"{module.name.partition('.experts.')[0]}.experts"
    return module.fused_group or module.name
