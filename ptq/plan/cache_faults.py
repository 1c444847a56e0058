"""What is wrong with how a recipe quantizes the cache of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from formats.cache_scheme import KVCacheSpec
from formats.checkpoint.targets import is_ignored
from formats.families.attention import LatentAttention
from formats.families.family import Family
from formats.modeling.layers import cached, structure_of
from ptq.recipe.schema import Recipe
from ptq.recipe.strict_yaml import Key

BEYOND_PRODUCTS = frozenset({"softcap", "s_aux"})  # arguments that a shift of all logits changes


def check_caches(
    recipe: Recipe, family: Family | None, config: Mapping[str, Any], blocks: Sequence[str]
) -> Iterator[tuple[Key, str]]:
    """Patterns of `caches` that match no block, and caches that a model's attention does not have.

    Args:
        recipe: The run.
        family: The model's, if it is declared.
        config: config.json.
        blocks: Full names of the decoder blocks.
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


def _misfits(
    cache: KVCacheSpec,
    key: Key,
    family: Family | None,
    config: Mapping[str, Any],
    blocks: Sequence[str],
) -> Iterator[tuple[Key, str]]:
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
    if cache.center_keys and _bends(family, config, blocks):
        yield (
            (*key, "center_keys"),
            "this model's attention bounds its logits or has sinks, which what is subtracted from "
            "all keys would change; set center_keys: false",
        )


def _bends(family: Family | None, config: Mapping[str, Any], blocks: Sequence[str]) -> bool:
    """Whether attention is of more than the differences of its logits."""
    if family is None:
        found = (structure_of(config).block(block).attention for block in blocks)
        return any(BEYOND_PRODUCTS & set(own.arguments) for own in found if own is not None)
    own = family.attention
    return own.sinks is not None or (
        own.softcap_setting is not None and config.get(own.softcap_setting) is not None
    )
