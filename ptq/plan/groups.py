"""Which layers of a decoder block belong together, told by their names alone.

Some are fused into one at run time, some read one input, and some are smoothed through one source.
A block has one feed-forward layer, or many: experts, and a shared one beside them. All of them,
and the routers that weigh them, read what the norm before them hands over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from formats.families.experts import EXPERT, is_router
from ptq.methods.common.smoothing_group import SmoothingGroup, SmoothingKind

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = {  # names of a feed-forward layer's parts, by the first: gate, up, down, the fused layer
    "gate_proj": ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
    "w1": ("w1", "w3", "w2", "w13"),
}


@dataclass(frozen=True)
class FeedForward:
    """Full names of a feed-forward layer's parts, and of gate and up fused."""

    gate: str
    up: str
    down: str
    fused: str

    @property
    def expert(self) -> bool:
        """Whether a router chooses it."""
        return EXPERT.search(self.gate) is not None


def feed_forward(names: Sequence[str]) -> Iterator[FeedForward]:
    """The feed-forward layers among a block's linear layers, each expert one of them."""
    for name in names:
        module, _, leaf = name.rpartition(".")
        if leaf in GATED:
            yield FeedForward(*(f"{module}.{part}" for part in GATED[leaf]))


def fused_layers(block: str, names: Sequence[str]) -> dict[str, str]:
    """Layers that runtimes fuse: full name of the fused one for each part.

    Parts must share their input's scale and their type.
    """
    fused = {f"{block}.{part}": f"{block}.self_attn.qkv_proj" for part in QKV}
    for layer in feed_forward(names):
        fused |= dict.fromkeys((layer.gate, layer.up), layer.fused)
    return fused


def common_inputs(block: str, names: Sequence[str]) -> dict[str, str]:
    """Layers that read one input: full name of the norm that it comes from, for each of them."""
    first = {f"{block}.{part}": f"{block}.input_layernorm" for part in QKV}
    readers = [part for layer in feed_forward(names) for part in (layer.gate, layer.up)]
    readers += filter(is_router, names)
    return first | dict.fromkeys(readers, f"{block}.post_attention_layernorm")


def smoothing_groups(
    block: str, names: Sequence[str], kinds: Sequence[SmoothingKind]
) -> Iterator[SmoothingGroup]:
    """The groups of a block that are of the wanted kinds, in the order of these.

    Args:
        block: Its full name.
        names: Full names of its linear layers and routers.
        kinds: What is wanted.
    """
    layers, attention = list(feed_forward(names)), f"{block}.self_attn"
    routers = tuple(filter(is_router, names))
    for kind in kinds:
        if kind == "attention_input":
            source, consumers = f"{block}.input_layernorm", tuple(f"{block}.{p}" for p in QKV)
            yield SmoothingGroup(kind=kind, block=block, source=source, consumers=consumers)
        elif kind == "attention_output":
            source, consumers = f"{attention}.v_proj", (f"{attention}.o_proj",)
            yield SmoothingGroup(kind=kind, block=block, source=source, consumers=consumers)
        elif kind == "mlp_input":
            source = f"{block}.post_attention_layernorm"
            consumers = tuple(part for layer in layers for part in (layer.gate, layer.up))
            yield SmoothingGroup(
                kind=kind, block=block, source=source, consumers=consumers, routers=routers
            )
        else:
            for layer in layers:
                tied = EXPERT.sub(".experts.*", layer.up) if layer.expert else None
                yield SmoothingGroup(
                    kind=kind, block=block, source=layer.up, consumers=(layer.down,), tied=tied
                )
