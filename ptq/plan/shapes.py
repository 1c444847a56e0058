"""The sizes of a decoder block that time and memory follow from; known from headers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from formats.families.experts import EXPERT, is_router
from ptq.methods.common.float_model import FloatModel
from ptq.methods.common.smoothing_group import SmoothingGroup, SmoothingKind
from ptq.plan.groups import common_inputs, smoothing_groups

SMALLEST_SHARD = 16 << 20  # bytes
Shape = tuple[int, int]  # of a weight: (out, in)


@dataclass(frozen=True)
class BlockShape:
    """What is known of a block before it is loaded.

    Attributes:
        name: Full name.
        layers: Its linear layers by full name, with the shapes of their weights.
        targets: Those that are quantized.
        routers: Full names of its routers.
        elements: Of all its tensors.
        hidden: Width of the residual stream.
        query: Elements of all query heads of a token.
        cached: Elements of K of a token, and of V.
        kv_heads: Heads of K, and of V.
        share: Part of the experts that a token is sent to; 1 without experts.
    """

    name: str
    layers: Mapping[str, Shape]
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
        return self.share if EXPERT.search(layer) else 1.0

    def inputs(self, layers: Iterable[str]) -> dict[str, list[str]]:
        """Layers by the distinct input that they read."""
        common = common_inputs(self.name, tuple(self.layers))
        distinct: dict[str, list[str]] = {}
        for name in layers:
            distinct.setdefault(common.get(name, name), []).append(name)
        return distinct

    def width(self, layers: Sequence[str]) -> int:
        """Elements of the input that layers read."""
        return self.layers[layers[0]][1]

    def groups(self, kinds: Sequence[SmoothingKind]) -> list[list[SmoothingGroup]]:
        """Smoothing groups that can be folded; those that are searched together, in one list."""
        tied: dict[str, list[SmoothingGroup]] = {}
        for group in smoothing_groups(self.name, (*self.layers, *self.routers), kinds):
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
) -> Iterator[BlockShape]:
    """The blocks of a model.

    Args:
        source: The model; only its headers are read.
        config: Its configuration.
        layers: Its linear layers and routers by full name, with the shapes of their weights.
        quantized: Full names of those that are quantized.
        blocks: Full names of its blocks.
    """
    elements, names = _by_block(source.names(), blocks), _by_block(layers, blocks)
    targets = _by_block(quantized, blocks)
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    for block in blocks:
        routers = tuple(filter(is_router, names[block]))
        experts = {match[1] for match in map(EXPERT.search, names[block]) if match}
        yield BlockShape(
            name=block,
            layers={name: layers[name] for name in names[block] if name not in routers},
            targets=tuple(targets[block]),
            routers=routers,
            elements=sum(math.prod(source.shape(name)) for name in elements[block]),
            hidden=config.hidden_size,
            query=heads * dim,
            cached=config.num_key_value_heads * dim,
            kv_heads=config.num_key_value_heads,
            share=config.num_experts_per_tok / len(experts) if experts else 1.0,
        )


def _by_block(names: Iterable[str], blocks: Sequence[str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {block: [] for block in blocks}
    for name in names:
        block = ".".join(name.split(".")[:3])  # model.layers.0
        if block in grouped:
            grouped[block].append(name)
    return grouped
