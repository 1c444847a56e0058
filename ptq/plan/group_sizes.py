"""Group sizes that a recipe leaves to its model, settled layer by layer before anything else.

`group_size: auto` becomes the largest groups that divide a layer's inputs, or one scale for each
output channel, and what has super-blocks loses them where they do not divide these
(`WeightSpec.fitted`). The recipe that comes of it names them all: its schemes are
those of most of their weights, and further entries of `layers` hold the others. That recipe is what
is checked, solved, written and repeated; the plan says once what its sizes cost.

fp8 blocks have one size, and are cut where a weight ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from formats.checkpoint.targets import layer_targets
from formats.scheme import AUTO, BLOCK, GROUP_SIZES, SUPER_BLOCK, LayerScheme, WeightSpec, either
from ptq.plan.modules import ModulePlan
from ptq.plan.preflight import weight_bytes
from ptq.recipe.schema import LayersSpec, Recipe
from ptq.text import size_text

Owner = int | None  # the entry of `layers` that decides on a layer; None for the recipe's scheme
Members = Mapping[tuple[Owner, LayerScheme], Sequence[ModulePlan]]


def settle_groups(
    recipe: Recipe, modules: tuple[ModulePlan, ...], dtype: torch.dtype
) -> tuple[Recipe, tuple[ModulePlan, ...], tuple[str, ...]]:
    """Give each layer the groups that fit it.

    Args:
        modules: What it makes of the model's layers.
        dtype: Of the model, which scales of integers have as well.

    Returns:
        (the recipe with no group size left open; the layers with the schemes that it gives them;
        where layers have other groups than the largest, why, and what that costs).
    """
    members: dict[tuple[Owner, LayerScheme], list[ModulePlan]] = {}
    for module in modules:
        if module.action == "quantize":
            owner = recipe.entry_of(module.name)
            fitted = _scheme_of(recipe, owner).fitted(module.shape[1])
            members.setdefault((owner, fitted), []).append(module)
    notes = (*_sizes(recipe, members, dtype), *_edges(members))
    if not any(_is_open(_scheme_of(recipe, owner)) for owner in _owners(recipe)):
        return recipe, modules, notes
    settled = _with_layers(recipe, members)
    fates = (
        module.model_copy(update={"reason": settled.scheme_of(module.name).text})
        if module.action == "quantize"
        else module
        for module in modules
    )
    return settled, tuple(fates), notes


def _owners(recipe: Recipe) -> Sequence[Owner]:
    return (None, *range(len(recipe.layers)))


def _scheme_of(recipe: Recipe, owner: Owner) -> LayerScheme:
    return recipe.scheme.of_layers if owner is None else recipe.layers[owner].scheme


def _is_open(scheme: LayerScheme) -> bool:
    weights = scheme.weights
    return weights is not None and (weights.group_size == AUTO or weights.super_blocks)


def _with_layers(recipe: Recipe, members: Members) -> Recipe:
    """Each scheme as most of its weights have it, and further entries for the others."""
    most = {owner: _most(recipe, owner, members) for owner in _owners(recipe)}
    targets = layer_targets([[m.name for m in layers] for layers in members.values()])
    others = [
        LayersSpec(match=tuple(patterns), scheme=scheme)
        for (owner, scheme), patterns in zip(members, targets, strict=True)
        if scheme != most[owner]
    ]
    entries = [
        entry.model_copy(update={"scheme": most[i]}) for i, entry in enumerate(recipe.layers)
    ]
    scheme = recipe.scheme.model_copy(update=dict(most[None]))
    return recipe.model_copy(update={"scheme": scheme, "layers": (*entries, *others)})


def _most(recipe: Recipe, owner: Owner, members: Members) -> LayerScheme:
    """What most weights of an owner have; of one without layers, the largest groups."""
    sizes = {
        scheme: sum(math.prod(module.shape) for module in layers)
        for (own, scheme), layers in members.items()
        if own == owner
    }
    return max(sizes, key=lambda one: sizes[one], default=_scheme_of(recipe, owner).widest)


def _sizes(recipe: Recipe, members: Members, dtype: torch.dtype) -> Iterator[str]:
    """Of each size that is not the largest: its layers, why, and its bytes."""
    found: dict[tuple[LayerScheme, LayerScheme], list[ModulePlan]] = {}
    for (owner, scheme), layers in members.items():
        widest = _scheme_of(recipe, owner).widest
        if scheme != widest:
            found.setdefault((widest, scheme), []).extend(layers)
    count = sum(map(len, members.values()))
    for (widest, scheme), layers in found.items():
        assert widest.weights is not None
        assert scheme.weights is not None
        inputs = sorted({module.shape[1] for module in layers})
        more = sum(
            weight_bytes(scheme, module.shape, dtype) - weight_bytes(widest, module.shape, dtype)
            for module in layers
        )
        yield (
            f"{_kind(widest.weights, scheme.weights)} in {len(layers)} of {count} layers, whose "
            f"{either(inputs)} inputs {_refused(widest.weights, scheme.weights)}: "
            f"{size_text(abs(more))} {'more' if more > 0 else 'less'} than in "
            f"{_largest(widest.weights)}"
        )


def _kind(widest: WeightSpec, spec: WeightSpec) -> str:
    """What a layer has in place of the largest groups."""
    if spec.group_size is None:
        return "a scale for each output channel"
    name = f" ({spec.format_name})" if spec.format_name else ""
    zeros = " with integer zero points" if widest.super_blocks else ""
    return f"groups of {spec.group_size}{name}{zeros}"


def _largest(widest: WeightSpec) -> str:
    """What most layers have."""
    if widest.super_blocks:
        return f"super-blocks of {SUPER_BLOCK}"
    return f"groups of {widest.block[1]}"


def _refused(widest: WeightSpec, spec: WeightSpec) -> str:
    """Why larger groups are none."""
    if spec.group_size is None:
        sizes = either(GROUP_SIZES[widest.dtype])
        return f"are no whole groups of {sizes}, the only ones that all readers take"
    return f"{SUPER_BLOCK if widest.super_blocks else widest.block[1]} does not divide"


def _edges(members: Members) -> Iterator[str]:
    """That blocks are cut, and who takes that."""
    cut = [
        module
        for (_, scheme), layers in members.items()
        for module in layers
        if scheme.weights is not None and scheme.weights.granularity == "block"
        if any(size % BLOCK for size in module.shape)
    ]
    if cut:
        sizes = sorted({size for module in cut for size in module.shape if size % BLOCK})
        yield (
            f"blocks are cut where weights end in {len(cut)} of {sum(map(len, members.values()))} "
            f"layers: {BLOCK} does not divide {either(sizes)}. This engine takes them; vLLM, "
            "SGLang and, where inputs are cut, transformers do not: fp8_channel is for all sizes"
        )
