"""Which schemes a group of layers may get: those that the target multiplies fast, bits apart.

| inputs | `cpu`, `gpu`                                | `vllm`                         |
|--------|---------------------------------------------|--------------------------------|
| float  | int4 in groups of 128, 64 or 32; int8       | the same                       |
| int8   | int4 in groups, inputs int8 by token; int8  | int4 in groups, inputs float;  |
|        | weights, inputs as the recipe's scheme says | int8 as the scheme says        |
| fp8    | not `cpu`: int4 in groups, inputs float;    | the same                       |
|        | fp8 as the scheme says                      |                                |

Where no such groups divide a layer's inputs, int4 has one scale for each output channel.

Each has a kernel of its own there (`kernels.triton.linear.dispatch`; vLLM's Marlin and CUTLASS
kernels of compressed-tensors), so that layers of several schemes stand side by side at full
speed. What a kernel would compute as floats is no candidate.

Layers that are multiplied as one are a group, and share a scheme.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from formats.errors import RecipeError
from formats.families.names import expert_of
from formats.scheme import BLOCK, PRESETS, LayerScheme, Scheme, WeightSpec
from ptq.plan.modules import ModulePlan
from ptq.plan.plan import Plan
from ptq.recipe.budget import Target

GROUPS = (BLOCK, 64, 32)


def candidates(scheme: LayerScheme, target: Target) -> dict[str, LayerScheme]:
    """Schemes by their short names, such as `w4_g64`; the fewest bits first.

    Args:
        scheme: Of the recipe: it says what inputs are.
        target: Where the model is to run.

    Raises:
        RecipeError: the target does not multiply such inputs.
    """
    if scheme.activations is not None and scheme.activations.dtype != "int8" and target == "cpu":
        raise RecipeError(
            "budget.target: found cpu, which multiplies no fp8 inputs; use the target gpu or vllm, "
            "or a scheme with float or int8 inputs, such as w4 or a8w4"
        )
    return {Scheme(**dict(one)).wac: one for one in _candidates(scheme, target)}


def _candidates(scheme: LayerScheme, target: Target) -> Iterator[LayerScheme]:
    inputs, weights = scheme.activations, scheme.weights
    integer = inputs is not None and inputs.dtype == "int8" and target != "vllm"
    token = PRESETS["a8w4"].activations if integer else None
    two_level = token is not None and weights is not None and weights.two_level
    for size in GROUPS:
        spec = WeightSpec(dtype="int4", granularity="group", group_size=size, two_level=two_level)
        yield LayerScheme(weights=spec, activations=token)
    yield LayerScheme(weights=WeightSpec(dtype="int4"), activations=token)
    if inputs is None or weights is None:
        yield LayerScheme(weights=WeightSpec())
    elif weights.bits == 8:
        yield scheme if not isinstance(scheme, Scheme) else scheme.of_layers
    else:
        yield LayerScheme(weights=WeightSpec(), activations=inputs)


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
        if module.action == "quantize" and module.name not in plan.predicting:
            found.setdefault(_label(module), []).append(module)
    return [Group(label, tuple(layers)) for label, layers in found.items()]


def _label(module: ModulePlan) -> str:
    if expert_of(module.name) is not None:
        return f"{module.name.partition('.experts.')[0]}.experts"
    return module.fused_group or module.name
