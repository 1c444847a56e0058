"""What happens to each linear layer of a model, and whether it goes together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from torch import nn

from formats.checkpoint.targets import is_ignored
from formats.families.family import Family
from formats.families.groups import merged_layers
from formats.families.names import is_router
from formats.scheme import Strict
from ptq.recipe.schema import Recipe
from ptq.recipe.strict_yaml import Key


class ModulePlan(Strict):
    """What happens to one linear layer or router.

    Attributes:
        name: Full name.
        action: Whether its weight and input are quantized or stay as they are.
        reason: Why, for a person.
        shape: Of its weight: (out, in).
        fused_group: Full name of the fused layer that it becomes a part of at run time, if any.
    """

    name: str
    action: Literal["quantize", "float"]
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
) -> Iterator[ModulePlan]:
    """The fate of every linear layer and router.

    Args:
        recipe: The run.
        family: Of the model.
        blocks: Full names of its decoder blocks.
        shapes: Weights of its linear layers and routers, by full name, in the model's order.
        names: The same layers' names by their block.
    """
    inside, merged = set[str](), dict[str, str]()
    for block in blocks:
        inside |= set(names[block])
        merged |= merged_layers(family, block, names[block])
    for name, shape in shapes.items():
        kept = None if name in inside else "outside of the decoder blocks"
        kept = kept or _kept_reason(recipe, name)
        yield ModulePlan(
            name=name,
            action="float" if kept else "quantize",
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


def check_modules(
    recipe: Recipe, family: Family, modules: tuple[ModulePlan, ...]
) -> Iterator[tuple[Key, str]]:
    """Layers whose fates do not go together, or that no kernel could run as planned.

    These are fused layers of which only some are ignored or that would have several schemes, a
    scheme that finds nothing to quantize, and weights that do not divide into groups or words.
    """
    groups: dict[str, list[ModulePlan]] = {}
    for module in modules:
        if module.fused_group is not None:
            groups.setdefault(module.fused_group, []).append(module)
    for group, members in groups.items():
        kept = [m.name.rpartition(".")[2] for m in members if m.action == "float"]
        if 0 < len(kept) < len(members):
            names = ", ".join(m.name.rpartition(".")[2] for m in members)
            entries = [
                i
                for i, entry in enumerate(recipe.ignore)
                if any(is_ignored(m.name, [entry]) for m in members)
            ]
            yield (
                ("ignore", entries[0]),
                f"{group} fuses {names}, but only {', '.join(kept)} "
                f"{'is' if len(kept) == 1 else 'are'} ignored; ignore all of them or none",
            )
        elif not kept:
            yield from _check_one_scheme(recipe, group, [m.name for m in members])
    yield from _check_divisible(recipe, modules)
    yield from _check_stored_merged(recipe, family, modules)
    left = [m.name for m in modules if m.action == "quantize"]
    if recipe.scheme.weights is not None and not left:
        yield ("ignore",), f"leaves no layer to the scheme {recipe.scheme.wac}; ignore fewer"
    if left and recipe.scheme.of_layers not in map(recipe.scheme_of, left):
        yield (
            ("layers",),
            f"leaves no layer to the scheme {recipe.scheme.wac}; give scheme what most of the "
            "layers are to have",
        )


def _check_one_scheme(
    recipe: Recipe, group: str, members: Sequence[str]
) -> Iterator[tuple[Key, str]]:
    """Layers that become one at run time and would be stored by different schemes."""
    schemes: dict[str, list[str]] = {}
    for name in members:
        leaf = name.rpartition(".")[2]
        schemes.setdefault(recipe.scheme_of(name).text, []).append(leaf)
    if len(schemes) > 1:
        entry = max(i for i in map(recipe.entry_of, members) if i is not None)
        parts = "; ".join(f"{', '.join(leaves)}: {text}" for text, leaves in schemes.items())
        yield (
            ("layers", entry, "match"),
            f"{group} fuses layers that would have different schemes ({parts}); match all of them "
            "or none",
        )


def _check_stored_merged(
    recipe: Recipe, family: Family, modules: tuple[ModulePlan, ...]
) -> Iterator[tuple[Key, str]]:
    """The first layer that is stored as a part of one, and whose scales do not lie side by side."""
    for module in modules:
        spec, entry = recipe.scheme_of(module.name).weights, recipe.entry_of(module.name)
        whole = (module.fused_group or "").rpartition(".")[2]
        if module.action != "quantize" or spec is None or whole not in family.stored_merged:
            continue
        rows = spec.block[0]
        if rows != 1 and (rows == -1 or module.shape[0] % rows):
            key: Key = ("scheme", "weights", "granularity")
            yield (
                key if entry is None else ("layers", entry, *key),
                f"{spec.granularity} does not fit {module.fused_group}: this family stores "
                f"{module.name.rpartition('.')[2]} of {module.shape[0]} rows as a part of it. Use "
                "per_channel or group",
            )
            return


def _check_divisible(recipe: Recipe, modules: tuple[ModulePlan, ...]) -> Iterator[tuple[Key, str]]:
    """Layers whose inputs are not whole groups, or whose outputs do not fill packed words."""
    for module in modules:
        rows, columns = module.shape
        spec, entry = recipe.scheme_of(module.name).weights, recipe.entry_of(module.name)
        if module.action != "quantize" or spec is None:
            continue
        key: Key = ("scheme", "weights")
        key = key if entry is None else ("layers", entry, *key)
        if spec.group_size is not None and columns % spec.group_size:
            fits = [size for size in (128, 64, 32) if columns % size == 0]
            hint = f"group_size {fits[0]} divides it" if fits else "add the layer to ignore"
            yield (
                (*key, "group_size"),
                f"{spec.group_size} does not divide the {columns} inputs of {module.name}; {hint}",
            )
        if not spec.symmetric and rows % (32 // spec.bits):
            yield (
                (*key, "symmetric"),
                f"zero points are packed {32 // spec.bits} a word, which does not divide the "
                f"{rows} outputs of {module.name}; use symmetric: true or add the layer to ignore",
            )
