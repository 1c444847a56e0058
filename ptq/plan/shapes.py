"""The sizes of a decoder block that time and memory follow from; known from headers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from formats.families.groups import SmoothingGroup, SmoothingKind
from formats.families.names import by_block, expert_of
from formats.modeling.layers import cached, common_inputs, query_elements, routers_of
from ptq.methods.common.float_model import FloatModel

SMALLEST_SHARD = 16 << 20  # bytes
Shape = tuple[int, int]  # of a weight: (out, in)


@dataclass(frozen=True)
class BlockShape:
    """What is known of a block before it is loaded.

    Attributes:
        name: Full name.
        layers: Its linear layers by full name, with the shapes of their weights.
        reads: A name for the input of each layer that shares it with others.
        smoothed: Its smoothing groups, of all kinds.
        targets: Those that are quantized.
        routers: Full names of its routers.
        elements: Of all its tensors.
        hidden: Width of the residual stream.
        query: Elements of all query heads of a token.
        cached: Elements of K of a token, and of V: the more of the two.
        kv_heads: Heads of K, and of V.
        share: Part of the experts that a token is sent to; 1 without experts.
    """

    name: str
    layers: Mapping[str, Shape]
    reads: Mapping[str, str]
    smoothed: tuple[SmoothingGroup, ...]
    targets: tuple[str, ...]
    routers: tuple[str, ...]
    elements: int
    hidden: int
    query: int
    cached: int
    kv_heads: int
    share: float

    def share_of(self, layer: str) -> float:
        """Part of the tokens that a layer sees where only the chosen experts run."""
        return 1.0 if expert_of(layer) is None else self.share

    def inputs(self, layers: Iterable[str]) -> dict[str, list[str]]:
        """Layers by the distinct input that they read."""
        distinct: dict[str, list[str]] = {}
        for name in layers:
            distinct.setdefault(self.reads.get(name, name), []).append(name)
        return distinct

    def width(self, layers: Sequence[str]) -> int:
        """Elements of the input that layers read."""
        return self.layers[layers[0]][1]

    def groups(self, kinds: Sequence[SmoothingKind]) -> list[list[SmoothingGroup]]:
        """Smoothing groups that can be folded; those that are searched together, in one list."""
        tied: dict[str, list[SmoothingGroup]] = {}
        wanted = (g for kind in kinds for g in self.smoothed if g.kind == kind)
        for group in wanted:
            source = (group.source,) if group.source in self.layers else ()
            if {*group.consumers, *source} <= set(self.targets):
                tied.setdefault(group.tied or group.source, []).append(group)
        return list(tied.values())

    def consumers(self, kind: SmoothingKind) -> int:
        """Elements of the weights that read a group of a kind, or those searched together."""
        sums = (
            sum(math.prod(self.layers[name]) for group in tied for name in group.consumers)
            for tied in self.groups([kind])
        )
        return max(sums, default=0)

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
        config: Its configuration.
        layers: Its linear layers and routers by full name, with the shapes of their weights.
        quantized: Full names of those that are quantized.
        blocks: Full names of its blocks.
        smoothed: Smoothing groups of all blocks.
    """
    elements, names, targets = by_block(source.names()), by_block(layers), by_block(quantized)
    of_blocks = dict(zip(blocks, cached(source.config), strict=True))
    is_router = routers_of(source.config)
    for block in blocks:
        routers = tuple(name for name in names[block] if is_router(name))
        experts = {expert_of(name) for name in names[block]} - {None}
        inside = {name: layers[name] for name in names[block] if name not in routers}
        yield BlockShape(
            name=block,
            layers=inside,
            reads=common_inputs(source.config, block, tuple(inside)),
            smoothed=tuple(group for group in smoothed if group.block == block),
            targets=tuple(targets.get(block, ())),
            routers=routers,
            elements=sum(math.prod(source.shape(name)) for name in elements.get(block, ())),
            hidden=config.get_text_config().hidden_size,
            query=query_elements(source.config, block),
            cached=of_blocks[block].heads * max(of_blocks[block].k, of_blocks[block].v),
            kv_heads=of_blocks[block].heads,
            share=_chosen(config) / len(experts) if experts else 1.0,
        )


def _chosen(config: PretrainedConfig) -> int:
    """Experts that a token is sent to, by the names that configurations have for their number."""
    keys = ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk", "num_experts_per_token")
    text = config.get_text_config()
    return next((getattr(text, key) for key in keys if hasattr(text, key)), 1)
