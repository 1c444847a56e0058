"""What happens to each linear layer of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from torch import nn

from formats.checkpoint.targets import is_ignored
from formats.families.family import Family
from formats.families.groups import merged_layers
from formats.families.names import is_router
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


def layer_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Linear layers and routers of a model, with the shapes of their weights."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear) or is_router(name):
            rows, columns = part.get_parameter("weight").shape
            yield name, (rows, columns)


def plan_modules(
    recipe: Recipe,
    family: Family,
    blocks: tuple[str, ...],
    shapes: Mapping[str, tuple[int, int]],
    names: Mapping[str, list[str]],
    stored: Mapping[str, LayerScheme],
) -> Iterator[ModulePlan]:
    """The fate of every linear layer and router.

    Args:
        recipe: The run.
        family: Of the model.
        blocks: Full names of its decoder blocks.
        shapes: Weights of its linear layers and routers, by full name, in the model's order.
        names: The same layers' names by their block.
        stored: Schemes of layers that came quantized and are kept so, by full name.
    """
    inside, merged = set[str](), dict[str, str]()
    for block in blocks:
        inside |= set(names[block])
        merged |= merged_layers(family, block, names[block])
    for name, shape in shapes.items():
        kept = None if name in inside else "outside of the decoder blocks"
        kept = kept or _kept_reason(recipe, name)
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


def _kept_reason(recipe: Recipe, name: str) -> str | None:
    """Why a layer of a decoder block stays in float, if it does."""
    if recipe.scheme.weights is None:
        return f"scheme {recipe.scheme.wac} quantizes the cache only"
    if is_router(name):
        return "router: it decides how much each expert counts"
    ignored = next((entry for entry in recipe.ignore if is_ignored(name, [entry])), None)
    return None if ignored is None else f"ignored by {ignored!r}"
