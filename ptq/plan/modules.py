"""What happens to each linear layer of a model.

The layer that gives logits, where a recipe quantizes it: which tensors that takes.

A head may be the embedding (tied). Where it is quantized then, its integers are both: a checkpoint
holds them once, as the head's, and has no embedding of its own. The method `untie` gives the head a
tensor of its own first, and leaves the embedding in float.

`block_shapes` has the sizes of decoder blocks that time and memory follow from, by headers alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PretrainedConfig

from calibrate.handed import rows_of_blocks
from formats.checkpoint.targets import is_ignored
from formats.families.block_layers import SmoothingGroup, SmoothingKind, by_block
from formats.families.predicting import Predicting
from formats.families.registry import find_family, predicting_layer
from formats.families.sizes import Cached
from formats.modeling.layers import (
    cached_of_blocks,
    common_inputs,
    head_name,
    is_narrow,
    merged_layers,
    predicting_twin,
    quantizable_of,
    query_elements,
    routers_of,
    stored_names,
    structure_of,
    tied_names,
)
from formats.scheme import LayerScheme, Strict
from ptq.methods.common.float_model import FloatModel, kept_layers
from ptq.methods.common.spec import Stage
from ptq.recipe.schema import Recipe

Shape = tuple[int, int]  # of a weight: (out, in)


class ModulePlan(Strict):
    """What happens to one linear layer or router.

    Attributes:
        action: Whether its weight and input are quantized, stay as they are, or the weight was
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
        blocks: Full names of its decoder blocks.
        shapes: Weights of its linear layers and routers, by full name, in the model's order.
        names: The same layers' names by their block.
        stored: Schemes of layers that are quantized already and are kept so, by full name.
    """
    inside, merged = {head_name(config)}, dict[str, str]()
    for block in blocks:
        inside |= set(names[block])
        merged |= merged_layers(config, block, names[block])
    kept_reason = _kept_reasons(recipe, config)
    for name, shape in shapes.items():
        kept = None if name in inside else "outside of the decoder blocks"
        yield _fate(recipe, name, shape, merged, kept or kept_reason(name), stored)


def plan_predicting(recipe: Recipe, model: FloatModel) -> Iterator[ModulePlan]:
    """The fate of every linear layer of the layers that predict further tokens.

    Args:
        model: As the recipe's methods see it.
    """
    config, layers = model.config, dict[str, dict[str, Shape]]()
    for name in model.names():
        layer, (module, _, leaf) = predicting_layer(config, name), name.rpartition(".")
        linear = leaf == "weight" and not module.endswith(f".{Predicting().embedding}")
        if layer is not None and linear and len(shape := model.shape(name)) == 2:
            layers.setdefault(layer, {})[module] = (shape[0], shape[1])
    kept_reason, stored = _kept_reasons(recipe, config), kept_layers(model)
    for layer, shapes in layers.items():
        merged = merged_layers(config, layer, list(shapes))
        for name, shape in shapes.items():
            like = predicting_twin(config, layer, name)
            kept = "around the block of a layer that predicts further tokens"
            kept = kept if like is None else kept_reason(name, like)
            yield _fate(recipe, name, shape, merged, kept, stored)


def _fate(
    recipe: Recipe,
    name: str,
    shape: Shape,
    merged: Mapping[str, str],
    kept: str | None,
    stored: Mapping[str, LayerScheme],
) -> ModulePlan:
    """What happens to a layer: `kept` says why it stays in float, if it does."""
    action, reason = "float" if kept else "quantize", kept or recipe.scheme_of(name).text
    if name in stored:
        action, reason = "stored", f"{stored[name].text}, as they were published"
    return ModulePlan(
        name=name, action=action, reason=reason, shape=shape, fused_group=merged.get(name)
    )


def _kept_reasons(recipe: Recipe, config: Mapping[str, Any]) -> Callable[..., str | None]:
    """Tells of a layer of a decoder block, or the head, why it stays in float, if it does.

    It is called with the layer's name, and with that of one of the model's blocks that it is like.
    """
    is_router, is_quantizable = routers_of(config), quantizable_of(config)
    declared, head = find_family(config) is not None, head_name(config)

    def reason(name: str, like: str | None = None) -> str | None:
        like = like or name
        if recipe.scheme.weights is None:
            return f"scheme {recipe.scheme.wac} quantizes the cache only"
        if is_router(like):
            return "router: it decides how much each expert counts"
        if is_narrow(config, like):
            return "it weighs what others compute, with few weights of its own"
        if not (declared or is_quantizable(like) or name == head):
            return "its code computes otherwise than a linear layer does, or never calls it"
        ignored = next((entry for entry in recipe.ignore if is_ignored(name, [entry])), None)
        return None if ignored is None else f"ignored by {ignored!r}"

    return reason


HEAD_STAGES = (Stage.ROTATE, Stage.ROUND)
"""Stages of the methods that a head is made by: it is no part of a block that others work on."""
PIECE = 1 << 26
"""Weights of a head that are solved at once: rows of it, so that memory ignores the vocabulary."""


def piece_rows(shape: tuple[int, int]) -> int:
    """Rows of a head [out, in] that are solved at once."""
    return min(shape[0], max(1, PIECE // shape[1] // 256) * 256)


def head_weight(model: FloatModel) -> str:
    """Name of the tensor that holds the head's weight: the embedding's where it is tied to it."""
    own = f"{head_name(model.config)}.weight"
    return own if own in model else tied_names(model.config).get(own, own)


def shared_embedding(model: FloatModel, quantized: Collection[str]) -> str | None:
    """Name of the embedding's tensor, where a head that is quantized is tied to it; else None.

    Args:
        quantized: Full names of the layers that are.
    """
    head = head_name(model.config)
    if head not in quantized:
        return None
    holds = head_weight(model)
    return None if holds == f"{head}.weight" else holds


SMALLEST_SHARD = 16 << 20  # bytes


@dataclass(frozen=True)
class BlockShape:
    """What is known of a block before it is loaded.

    Attributes:
        layers: Its linear layers by full name, with the shapes of their weights.
        reads: A name for the input of each layer that shares it with others.
        smoothed: Its smoothing groups, of all kinds.
        targets: Those that are quantized.
        elements: Of all its tensors.
        hidden: Width of the residual stream.
        row: Elements that are kept of a token before it: hidden states, of which Gemma 3n has
            several, and K and V of blocks before that it or later ones read.
        handed: Elements of a token that its code is handed beside, such as an embedding of its own.
        query: Elements of all query heads of a token.
        cached: Elements of K of a token, and of V: the more of the two.
        kv_heads: Heads of K, and of V.
    """

    name: str
    layers: Mapping[str, Shape]
    reads: Mapping[str, str]
    smoothed: tuple[SmoothingGroup, ...]
    targets: tuple[str, ...]
    elements: int
    hidden: int
    row: int
    handed: int
    query: int
    cached: int
    kv_heads: int

    def inputs(self, layers: Iterable[str]) -> dict[str, list[str]]:
        """Layers by the distinct input that they read."""
        distinct: dict[str, list[str]] = {}
        for name in layers:
            distinct.setdefault(self.reads.get(name, name), []).append(name)
        return distinct

    def width(self, layers: Sequence[str]) -> int:
        """Elements of the input that layers read."""
        return self.layers[layers[0]][1]

    def consumers(self, kind: SmoothingKind) -> int:
        """Elements of the weights that read a group of a kind that can be folded, or those that are
        searched together: the most.
        """
        sums = Counter[str]()
        for group in self.smoothed:
            source = (group.source,) if group.source in self.layers else ()
            if group.kind == kind and {*group.consumers, *source} <= set(self.targets):
                elements = (math.prod(self.layers[name]) for name in group.consumers)
                sums[group.tied or group.source] += sum(elements)
        return max(sums.values(), default=0)

    @property
    def quantized(self) -> list[Shape]:
        """Shapes of the layers that are quantized."""
        return [self.layers[name] for name in self.targets]


def shard_bytes(elements: int) -> int:
    """Size of a weight file: that of the largest block in fp32, so that memory ignores depth."""
    return max(SMALLEST_SHARD, 4 * elements)


def block_shapes(
    source: FloatModel,
    config: PretrainedConfig,
    layers: Mapping[str, Shape],
    quantized: Iterable[str],
    blocks: Sequence[str],
    smoothed: Sequence[SmoothingGroup],
) -> Iterator[BlockShape]:
    """The blocks of a model.

    Args:
        source: The model; only its headers are read.
        layers: Its linear layers and routers by full name, with the shapes of their weights.
        quantized: Full names of those that are quantized.
    """
    elements, names, targets = by_block(source.names()), by_block(layers), by_block(quantized)
    of_blocks = dict(zip(blocks, cached_of_blocks(source.config), strict=True))
    is_router, text = routers_of(source.config), config.get_text_config()
    hidden, lent = text.hidden_size, [0] * len(blocks)
    if find_family(source.config) is None:
        rows = rows_of_blocks(structure_of(source.config), "", None)
        lent = [row.lent for row in rows]
    for block, also in zip(blocks, lent, strict=True):
        own = of_blocks[block] or Cached(0, 0, 0)
        inside = {name: layers[name] for name in names[block] if not is_router(name)}
        yield BlockShape(
            name=block,
            layers=inside,
            reads=common_inputs(source.config, block, tuple(inside)),
            smoothed=tuple(group for group in smoothed if group.block == block),
            targets=tuple(targets.get(block, ())),
            elements=sum(math.prod(source.shape(name)) for name in elements.get(block, ())),
            hidden=hidden,
            row=hidden * getattr(text, "altup_num_inputs", 1) + also,
            handed=getattr(text, "hidden_size_per_layer_input", 0) or 0,
            query=query_elements(source.config, block),
            cached=own.heads * max(own.k, own.v),
            kv_heads=own.heads,
        )
