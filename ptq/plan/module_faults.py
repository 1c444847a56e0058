"""Layers whose planned fates do not go together, or that no kernel could run as planned.

A fault that many layers share is reported once, with their number and the first names.

The same of the cache: how a recipe quantizes it, and what the model has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from formats.cache_scheme import KVCacheSpec
from formats.checkpoint.targets import is_ignored
from formats.families.block_layers import split_name
from formats.families.family import Family, LatentAttention
from formats.families.sizes import may_centre
from formats.modeling.layers import cached, structure_of
from formats.scheme import GROUP_SIZES, WeightSpec
from ptq.methods.common.method import first_names
from ptq.plan.modules import ModulePlan
from ptq.recipe.problems import Faults, Where
from ptq.recipe.schema import Recipe
from ptq.recipe.strict_yaml import Key


def check_modules(recipe: Recipe, family: Family | None, modules: tuple[ModulePlan, ...]) -> Faults:
    """What is wrong with the fates of a model's layers.

    These are fused layers of which only some are ignored or that would have several schemes, a
    scheme that finds nothing to quantize, and weights that do not divide into groups or words.
    """
    yield from _check_fused(recipe, modules)
    yield from _check_divisible(recipe, modules)
    yield from _check_stored_merged(recipe, family, modules)
    yield from _check_head(recipe, modules)
    left = [m.name for m in modules if m.action == "quantize"]
    if recipe.scheme.weights is not None and not left:
        yield ("ignore",), f"leaves no layer to the scheme {recipe.scheme.wac}; ignore fewer"
    if left and recipe.scheme.of_layers not in map(recipe.scheme_of, left):
        yield (
            ("layers",),
            f"leaves no layer to the scheme {recipe.scheme.wac}; give scheme what most of the "
            "layers are to have",
        )


def _check_head(recipe: Recipe, modules: Sequence[ModulePlan]) -> Faults:
    """A head with one scale for all of it: it is solved some rows at a time."""
    for module in modules:
        spec, entry = recipe.scheme_of(module.name).weights, recipe.entry_of(module.name)
        outside = module.action == "quantize" and split_name(module.name) is None
        if outside and spec is not None and spec.block[0] == -1:
            yield (
                _key(entry, "granularity"),
                f"{spec.granularity} does not fit {module.name}, which is solved some rows at a "
                f"time; give it a scheme with scales per channel in layers, such as "
                f"{{match: [{module.name}], scheme: fp8_channel}}",
            )


def _check_fused(recipe: Recipe, modules: Sequence[ModulePlan]) -> Faults:
    """Layers that become one at run time, and of which that is not planned."""
    groups: dict[str, list[ModulePlan]] = {}
    for module in modules:
        if module.fused_group is not None:
            groups.setdefault(module.fused_group, []).append(module)
    found: dict[tuple[Key, str], list[str]] = {}
    for group, members in groups.items():
        fault = _split_by_ignore(recipe, members) or _split_by_scheme(recipe, members)
        if fault is not None:
            found.setdefault(fault, []).append(group)
    for (key, fault), (first, *others) in found.items():
        more = f", here and in {len(others)} more: {first_names(others)}" if others else ""
        yield key, f"{first} fuses {fault}{more}"


def _split_by_ignore(recipe: Recipe, members: Sequence[ModulePlan]) -> tuple[Key, str] | None:
    """The entry of `ignore` that takes only some of these layers, and what to do."""
    kept = [_leaf(m.name) for m in members if m.action == "float"]
    if not 0 < len(kept) < len(members):
        return None
    entry = next(
        i
        for i, entry in enumerate(recipe.ignore)
        if any(is_ignored(m.name, [entry]) for m in members)
    )
    all_of_them = ", ".join(_leaf(m.name) for m in members)
    verb = "is" if len(kept) == 1 else "are"
    fault = f"{all_of_them}, but only {', '.join(kept)} {verb} ignored; ignore all of them or none"
    return ("ignore", entry), fault


def _split_by_scheme(recipe: Recipe, members: Sequence[ModulePlan]) -> tuple[Key, str] | None:
    """The entry of `layers` that gives only some of these layers a scheme, and what to do."""
    schemes: dict[str, list[str]] = {}
    for module in members:
        if module.action == "quantize":
            text = recipe.scheme_of(module.name).text
            schemes.setdefault(text, []).append(_leaf(module.name))
    if len(schemes) < 2:
        return None
    entry = max(i for i in (recipe.entry_of(m.name) for m in members) if i is not None)
    parts = "; ".join(f"{', '.join(leaves)}: {text}" for text, leaves in schemes.items())
    fault = f"layers that would have different schemes ({parts}); match all of them or none"
    return ("layers", entry, "match"), fault


def _check_divisible(recipe: Recipe, modules: Sequence[ModulePlan]) -> Faults:
    """Layers whose inputs are not whole groups, whose outputs do not fill packed words, or whose
    zero points no method makes."""
    by_entry: dict[int | None, list[ModulePlan]] = {}
    for module in modules:
        if module.action == "quantize":
            by_entry.setdefault(recipe.entry_of(module.name), []).append(module)
    for entry, members in by_entry.items():
        spec = recipe.scheme_of(members[0].name).weights
        if spec is not None:
            yield from _check_groups(entry, spec, members)
            yield from _check_words(entry, spec, members)
            if spec.float_zeros and not spec.super_blocks:
                yield (
                    _key(entry, "zero_points"),
                    "float zero points are those of .gguf files, and methods solve integer ones; "
                    "set zero_points: integer, or two_level: true for those of Q4_K",
                )


def _key(entry: int | None, leaf: str) -> Key:
    """Where a recipe says it of its weights: in `scheme`, or in an entry of `layers`."""
    key: Key = ("scheme", "weights", leaf)
    return key if entry is None else ("layers", entry, *key)


def _check_groups(entry: int | None, spec: WeightSpec, members: Sequence[ModulePlan]) -> Faults:
    size = spec.block[1]
    uneven = [m for m in members if spec.granularity == "group" and m.shape[1] % size]
    if not uneven:
        return
    fits = [n for n in GROUP_SIZES[spec.dtype] if not any(m.shape[1] % n for m in members)]
    names = first_names([f"{m.name} ({m.shape[1]})" for m in uneven])
    ways = ["auto takes what fits each layer"] if fits or spec.dtype != "fp4_e2m1" else []
    ways += [] if fits else [_ignoring(uneven)]
    verb = "divides" if len(fits) == 1 else "divide"
    yield (
        _key(entry, "group_size"),
        f"{size} does not divide the inputs of {len(uneven)} of {len(members)} layers: {names}; "
        f"{' and '.join(map(str, fits)) or 'no group size'} {verb if fits else 'divides'} all "
        f"inputs: {', or '.join(ways)}",
    )


def _check_words(entry: int | None, spec: WeightSpec, members: Sequence[ModulePlan]) -> Faults:
    word = 32 // spec.bits
    uneven = [m for m in members if not spec.symmetric and m.shape[0] % word]
    if uneven and not spec.float_zeros:
        names = first_names([f"{m.name} ({m.shape[0]})" for m in uneven])
        yield (
            _key(entry, "symmetric"),
            f"zero points are packed {word} a word, which does not divide the outputs of "
            f"{len(uneven)} of {len(members)} layers: {names}; use symmetric: true, or "
            f"{_ignoring(uneven)}",
        )


def _ignoring(modules: Sequence[ModulePlan]) -> str:
    """How to leave out layers of these kinds."""
    kinds = dict.fromkeys(f"'re:.*{_leaf(module.name)}'" for module in modules)
    return f"add {', '.join(kinds)} to ignore"


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _check_stored_merged(
    recipe: Recipe, family: Family | None, modules: tuple[ModulePlan, ...]
) -> Faults:
    """The first layer that is stored as a part of one, and whose scales do not lie side by side."""
    stored = () if family is None else family.stored_merged
    for module in modules:
        spec, entry = recipe.scheme_of(module.name).weights, recipe.entry_of(module.name)
        whole = (module.fused_group or "").rpartition(".")[2]
        if module.action != "quantize" or spec is None or whole not in stored:
            continue
        rows = spec.block[0]
        if rows != 1 and (rows == -1 or module.shape[0] % rows):
            yield (
                _key(entry, "granularity"),
                f"{spec.granularity} does not fit {module.fused_group}: this family stores "
                f"{module.name.rpartition('.')[2]} of {module.shape[0]} rows as a part of it. Use "
                "per_channel or group",
            )
            return


BEYOND_PRODUCTS = frozenset({"softcap", "s_aux"})  # arguments that a shift of all logits changes


def check_caches(
    recipe: Recipe, family: Family | None, config: Mapping[str, Any], blocks: Sequence[str]
) -> Faults:
    """Patterns of `caches` that match no block, and caches that a model's attention does not have.

    Args:
        family: The model's, if it is declared.
    """
    for i, entry in enumerate(recipe.caches):
        for j, pattern in enumerate(entry.match):
            if not any(is_ignored(block, [pattern]) for block in blocks):
                yield (
                    ("caches", i, "match", j),
                    f"{pattern!r} matches no block; they are {blocks[0]} to {blocks[-1]}",
                )
        if entry.kv_cache is not None:
            key: Key = ("caches", i, "kv_cache")
            yield from _misfits(entry.kv_cache, key, family, config, blocks)
    if recipe.scheme.kv_cache is not None:
        key = ("scheme", "kv_cache")
        yield from _misfits(recipe.scheme.kv_cache, key, family, config, blocks)
    if recipe.scheme.states is not None and not structure_of(config).mixers:
        fault = f"{config.get('model_type')!r} keeps no recurrent states; leave it out"
        yield ("scheme", "states"), fault


def _misfits(
    cache: KVCacheSpec,
    key: Key,
    family: Family | None,
    config: Mapping[str, Any],
    blocks: Sequence[str],
) -> Faults:
    latent = family is not None and isinstance(family.attention, LatentAttention)
    if latent and cache.dynamic:
        yield (
            (*key, "granularity"),
            f"found {cache.granularity}; latents, which this model caches, have static scales; "
            "use per_head",
        )
    elif latent and (cache.packed or cache.rotate_keys or cache.center_keys):
        yield (
            (*key, "dtype"),
            f"found {cache.text}; latents, which this model caches, have 8 bits, and stay as they "
            "are; use dtype: int8 alone",
        )
    if latent:
        return
    odd = [own for own in cached(config) if (own.k if cache.dtype == "int4" else own.v) % 2]
    if cache.packed and odd:
        yield (*key, "dtype"), f"heads of {odd[0].k} numbers do not lie two in a byte; use int8"
    if cache.center_keys and not _may_centre(family, config, blocks):
        yield (
            (*key, "center_keys"),
            "this model's attention bounds its logits or has sinks, which what is subtracted from "
            "all keys would change; set center_keys: false",
        )


def settle_keys(
    recipe: Recipe,
    family: Family | None,
    config: Mapping[str, Any],
    blocks: Sequence[str],
    where: Where,
) -> Recipe:
    """A recipe that centres keys where the model's attention allows it, or where it says so itself.

    A scheme that is named as a whole leaves keys as they are where they cannot be centred; what was
    written is refused by `check_caches`.
    """
    if not any(c.center_keys for c in recipe.quantized_caches) or _may_centre(
        family, config, blocks
    ):
        return recipe

    def settled(key: Key, cache: KVCacheSpec | None) -> KVCacheSpec | None:
        written = (*key, "kv_cache", "center_keys") in where.origins
        return cache if cache is None or written else cache.uncentred

    own = settled(("scheme",), recipe.scheme.kv_cache)
    caches = (
        entry.model_copy(update={"kv_cache": settled(("caches", i), entry.kv_cache)})
        for i, entry in enumerate(recipe.caches)
    )
    scheme = recipe.scheme.model_copy(update={"kv_cache": own})
    return recipe.model_copy(update={"scheme": scheme, "caches": tuple(caches)})


def _may_centre(family: Family | None, config: Mapping[str, Any], blocks: Sequence[str]) -> bool:
    """Whether attention sees nothing of what is subtracted from all keys of a head."""
    if family is not None:
        return may_centre(family, config)
    found = (structure_of(config).block(block).attention for block in blocks)
    return not any(BEYOND_PRODUCTS & set(own.arguments) for own in found if own is not None)
