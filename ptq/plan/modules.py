"""What happens to each linear layer of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from torch import nn

from formats.checkpoint.targets import is_ignored
from formats.families.registry import find_family
from formats.modeling.layers import (
    head_name,
    merged_layers,
    quantizable_of,
    routers_of,
    stored_names,
)
from formats.scheme import LayerScheme, Strict
from ptq.recipe.schema import Recipe


class ModulePlan(Strict):
    """What happens to one linear layer or router.

    Attributes:
        name: Full name.
        action: Whether its weight and input are quantized, stay as they are, or the weight came
            quantized and stays as it is stored.
        reason: Why, for a person.
        shape: Of its weight: (out, in).
        fused_group: Full name of the fused layer that it becomes a part of at run time, if any.
    """

    name: str
    action: Literal["quantize", "float", "stored"]
    reason: str
    shape: tuple[int, int]
    fused_group: str | None


def layer_shapes(
    model: nn.Module, config: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Linear layers and routers of a model, with the shapes of their weights.

    Args:
        model: On the meta device.
        config: config.json of it.
    """
    stored, is_router = stored_names(config), routers_of(config)
    for code, part in model.named_modules():
        name = stored.get(f"{code}.weight", f"{code}.weight").removesuffix(".weight")
        if isinstance(part, nn.Linear) or is_router(name):
            rows, columns = part.get_parameter("weight").shape
            yield name, (rows, columns)


def plan_modules(
    recipe: Recipe,
    config: Mapping[str, Any],
    blocks: tuple[str, ...],
    shapes: Mapping[str, tuple[int, int]],
    names: Mapping[str, list[str]],
    stored: Mapping[str, LayerScheme],
) -> Iterator[ModulePlan]:
    """The fate of every linear layer and router.

    Args:
        recipe: The run.
        config: config.json of the model.
        blocks: Full names of its decoder blocks.
        shapes: Weights of its linear layers and routers, by full name, in the model's order.
        names: The same layers' names by their block.
        stored: Schemes of layers that came quantized and are kept so, by full name.
    """
    inside, merged = {head_name(config)}, dict[str, str]()
    for block in blocks:
        inside |= set(names[block])
        merged |= merged_layers(config, block, names[block])
    kept_reason = _kept_reasons(recipe, config)
    for name, shape in shapes.items():
        kept = None if name in inside else "outside of the decoder blocks"
        kept = kept or kept_reason(name)
        if name in stored:
            kept = f"{stored[name].text}, as they were published"
        left = "stored" if name in stored else "float"
        yield ModulePlan(
            name=name,
            action=left if kept else "quantize",
            reason=kept or recipe.scheme_of(name).text,
            shape=shape,
            fused_group=merged.get(name),
        )


def _kept_reasons(recipe: Recipe, config: Mapping[str, Any]) -> Callable[[str], str | None]:
    """Tells of a layer of a decoder block, or the head, why it stays in float, if it does."""
    is_router, is_quantizable = routers_of(config), quantizable_of(config)
    declared, head = find_family(config) is not None, head_name(config)

    def reason(name: str) -> str | None:
        if recipe.scheme.weights is None:
            return f"scheme {recipe.scheme.wac} quantizes the cache only"
        if is_router(name):
            return "router: it decides how much each expert counts"
        if not (declared or is_quantizable(name) or name == head):
            return "its code computes otherwise than a linear layer does, or never calls it"
        ignored = next((entry for entry in recipe.ignore if is_ignored(name, [entry])), None)
        return None if ignored is None else f"ignored by {ignored!r}"

    return reason
