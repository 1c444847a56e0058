"""Which blocks, attention modules and linear layers a model has, declared or found.

Code that needs these names asks here. Of a declared family they follow from config.json alone, and
neither torch nor transformers is imported; of others they come from transformers' code
(`formats.modeling.found`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from formats.errors import CheckpointError
from formats.families import block_layers, registry
from formats.families.predicting import UNDECLARED, Predicting
from formats.families.registry import find_family
from formats.families.sizes import Cached, cached_of, heads_of
from formats.modeling.structure import Structure

LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""Where configurations say how many tokens a sequence may have; those of MPT, Bloom."""


def structure_of(config: Mapping[str, Any]) -> Structure:
    """What the code of config.json's model says of it; built once and kept.

    Raises:
        CheckpointError: it is no causal decoder whose attention goes through transformers'
            attention interface; the message says what it is instead.
    """
    return _structure_of(json.dumps(dict(config), sort_keys=True, default=str))


@lru_cache(maxsize=16)
def _structure_of(text: str) -> Structure:
    from formats.modeling.found import found_structure  # imports torch and transformers

    return found_structure(json.loads(text))


def block_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Full names of a model's decoder blocks, in their order.

    Raises:
        CheckpointError: it is not run here, or config.json gives no number of blocks.
    """
    if find_family(config) is not None:
        return registry.block_names(config)
    return tuple(block.name for block in structure_of(config).blocks)


def attention_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Full names of the attention modules that have K and V of their own; errors likewise."""
    return tuple(name for name in attention_of_blocks(config) if name is not None)


def attention_of_blocks(config: Mapping[str, Any]) -> tuple[str | None, ...]:
    """The attention module of each block, None without K and V of its own; errors likewise."""
    if find_family(config) is not None:
        return registry.attention_names(config)
    sites = (block.cache for block in structure_of(config).blocks)
    return tuple(None if site is None else site.module for site in sites)


def cached(config: Mapping[str, Any]) -> tuple[Cached, ...]:
    """What each block that caches anything does, in their order; errors as of `block_names`."""
    return tuple(own for own in cached_of_blocks(config) if own is not None)


def cached_of_blocks(config: Mapping[str, Any]) -> tuple[Cached | None, ...]:
    """What each block caches, None of one that caches nothing; errors as of `block_names`."""
    family = find_family(config)
    if family is not None:
        return (cached_of(family, config),) * len(block_names(config))
    sites = [block.cache for block in structure_of(config).blocks]
    return tuple(s and Cached(s.kv_heads, s.key_size, s.value_size) for s in sites)


def positions_of(config: Any) -> int:
    """Most tokens of a sequence, by transformers' configuration of a model.

    Raises:
        CheckpointError: it says nothing, as that of a model with ALiBi may.
    """
    values = (getattr(config, key, None) for key in LENGTHS)
    found = next((value for value in values if isinstance(value, int)), None)
    if found is None:
        raise CheckpointError(
            "config.json: max_position_embeddings is missing. Add how many tokens a sequence of "
            "this model may have"
        )
    return found


def query_elements(config: Mapping[str, Any], block: str) -> int:
    """Elements of all query heads of a token in a block; errors as of `block_names`."""
    if find_family(config) is not None:
        heads = heads_of(config)
        return heads.query * heads.size
    site = structure_of(config).block(block).attention
    return 0 if site is None else site.query_heads * site.key_size


def embedding_name(config: Mapping[str, Any]) -> str:
    """Full name of the token embedding; errors as of `block_names`."""
    return (
        block_layers.EMBEDDING
        if find_family(config) is not None
        else structure_of(config).embedding
    )


def head_name(config: Mapping[str, Any]) -> str:
    """Full name of the layer that gives logits; errors as of `block_names`."""
    return block_layers.HEAD if find_family(config) is not None else structure_of(config).head


def common_inputs(config: Mapping[str, Any], block: str, layers: Sequence[str]) -> dict[str, str]:
    """Layers of a block that read one input: a name for that input, for each of them.

    Args:
        layers: Full names of its linear layers and routers.
    """
    family = find_family(config)
    if family is not None:
        return block_layers.common_inputs(family, block, layers)
    found = structure_of(config).block(block).inputs
    return {name: found[name] for name in layers if name in found}


def merged_layers(config: Mapping[str, Any], block: str, layers: Sequence[str]) -> dict[str, str]:
    """Layers that runtimes merge: full name of the merged one for each part; none of found ones."""
    family = find_family(config)
    return {} if family is None else block_layers.merged_layers(family, block, layers)


def routers_of(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Tells of a full name whether it is that of a layer that says how much an expert counts."""
    if find_family(config) is not None:
        return block_layers.is_router
    return structure_of(config).routers.__contains__


def stored_names(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Name in the files of each tensor of the code on the meta device, where the two differ."""
    return {} if find_family(config) is not None else structure_of(config).stored


def tied_names(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Tensors that the files may lack, and by which one each is replaced then."""
    if find_family(config) is None:
        return structure_of(config).tied
    tied = config.get("tie_word_embeddings", False)
    return {f"{block_layers.HEAD}.weight": f"{block_layers.EMBEDDING}.weight"} if tied else {}


def quantizable_of(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Tells of a full name whether it is that of a linear layer of a block to be quantized."""
    if find_family(config) is not None:
        return block_layers.is_projection
    return structure_of(config).quantizable.__contains__


def is_narrow(config: Mapping[str, Any], layer: str) -> bool:
    """Whether a linear layer of a block, by its full name, weighs what others compute."""
    return find_family(config) is None and layer in structure_of(config).narrow


def stacks_of(config: Mapping[str, Any], *, listed: bool = False) -> Mapping[str, tuple[str, ...]]:
    """`Structure.stacks`; of a model that is declared, or not run here, there are none.

    Args:
        listed: With those of `Structure.listed`.
    """
    found = _found(config)
    return {} if found is None else {**found.stacks, **(found.listed if listed else {})}


def renamed_of(config: Mapping[str, Any]) -> Mapping[str, str]:
    """`Structure.stored`; of a model that is declared, or not run here, nothing is renamed."""
    found = _found(config)
    return {} if found is None else found.stored


def predicting_twin(config: Mapping[str, Any], layer: str, module: str) -> str | None:
    """The linear layer of a block of the model that one of a layer for further tokens is like.

    Args:
        layer: Full name of the layer that predicts further tokens.
        module: Full name of the linear layer in it.

    Returns:
        Its full name, of a declared family the same; None for what is around the block, and what
        is in no block of the model.
    """
    family, inside = find_family(config), module.removeprefix(f"{layer}.")
    undeclared = UNDECLARED if layer == UNDECLARED.module else Predicting()
    own = undeclared if family is None else family.predicting or undeclared
    if own.block is not None:
        blocks, _, rest = inside.partition(".")
        inside = rest.partition(".")[2] if blocks == own.block.partition(".")[0] else ""
    if not inside or inside in (own.joined, own.head):
        return None
    if family is not None:
        return (
            module if block_layers.is_projection(module) or block_layers.is_router(module) else None
        )
    found = structure_of(config)
    known = found.quantizable | found.narrow | found.routers
    alike = (f"{block.name}.{inside}" for block in found.blocks)
    return next((name for name in alike if name in known), None)


def tied_in_blocks(config: Mapping[str, Any]) -> Mapping[str, str]:
    """`tied_names` of tensors of blocks; of a model that is declared, or not run here, none."""
    found = _found(config)
    own = {} if found is None else found.tied
    return {name: other for name, other in own.items() if block_layers.block_of(name) is not None}


def _found(config: Mapping[str, Any]) -> Structure | None:
    try:
        return None if find_family(config) is not None else structure_of(config)
    except CheckpointError:  # said where it is run
        return None
