"""Which layers of a decoder block belong together, by its family's declaration.

Some are merged into one at run time, some read one input, and some are smoothed through one source.
A block has one feed-forward layer, or many: experts, and a shared one beside them. All of them,
and the routers that weigh them, read what the norm before them hands over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from formats.documents import Strict
from formats.families.family import Family, GatedMLP, LatentAttention
from formats.families.names import any_expert, expert_of, is_router

SmoothingKind = Literal["attention_input", "attention_output", "mlp_input", "mlp_output"]
SMOOTHING_KINDS: tuple[SmoothingKind, ...] = (
    "attention_input",
    "attention_output",
    "mlp_input",
    "mlp_output",
)


class SmoothingGroup(Strict):
    """A source whose output channels can be divided while its consumers are multiplied.

    Attributes:
        kind: Which of a block's groups it is; see `ptq.methods.smoothquant`.
        block: Full name of the decoder block.
        source: Full name of the norm, or of the linear layer v_proj or up_proj, that is divided
            (with its bias, where it has one).
        consumers: Full names of the linear layers that read it.
        routers: Full names of routers that read it. They are multiplied too, and not quantized.
        tied: Name for the groups that get one strength together: the experts of a block. None for
            a group that is searched alone.
        offset: What the source, if it is a norm, adds to its weight before it multiplies by it: 1
            for Gemma's 1 + w.
    """

    kind: SmoothingKind
    block: str
    source: str
    consumers: tuple[str, ...]
    routers: tuple[str, ...] = ()
    tied: str | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class FeedForwardLayer:
    """Full names of the parts of one feed-forward layer, and of gate and up merged."""

    gate: str
    up: str
    down: str
    merged: str


def feed_forward_layers(family: Family, names: Sequence[str]) -> Iterator[FeedForwardLayer]:
    """The feed-forward layers among a block's linear layers, each expert one of them."""
    kinds: dict[str, GatedMLP] = {kind.gate: kind for kind in family.feed_forwards}
    for name in names:
        module, _, leaf = name.rpartition(".")
        if leaf in kinds:
            kind = kinds[leaf]
            parts = (kind.gate, kind.up, kind.down, kind.merged)
            yield FeedForwardLayer(*(f"{module}.{part}" for part in parts))


def merged_layers(family: Family, block: str, names: Sequence[str]) -> dict[str, str]:
    """Layers that runtimes merge: full name of the merged one for each part.

    Parts must share their input's scale and their type.
    """
    module, present, merged = f"{block}.{family.attention.module}", set(names), dict[str, str]()
    for whole, parts in family.attention.merges:
        full = [f"{module}.{part}" for part in parts]
        merged |= dict.fromkeys(full, f"{module}.{whole}") if present.issuperset(full) else {}
    for layer in feed_forward_layers(family, names):
        merged |= dict.fromkeys((layer.gate, layer.up), layer.merged)
    return merged


def common_inputs(family: Family, block: str, names: Sequence[str]) -> dict[str, str]:
    """Layers that read one input: a name for that input, for each of them.

    The name is that of the norm that the input comes from, or, where layers read the residual
    stream itself, that of their module.
    """
    attention, norms = family.attention, family.norms
    first = f"{block}.{norms.before_attention or attention.module}"
    second = f"{block}.{norms.before_feed_forward or 'mlp'}"
    common = {f"{block}.{attention.module}.{part}": first for part in attention.inputs}
    layers = feed_forward_layers(family, names)
    readers = [part for layer in layers for part in (layer.gate, layer.up)]
    readers += filter(is_router, names)
    return common | dict.fromkeys(readers, second)


def smoothing_groups(
    family: Family, block: str, names: Sequence[str], kinds: Sequence[SmoothingKind]
) -> Iterator[SmoothingGroup]:
    """The groups of a block that are of the wanted kinds, in the order of these.

    What reads the residual stream itself has no norm to be smoothed through, and no group.

    Args:
        names: Full names of its linear layers and routers.
        kinds: What is wanted.
    """
    for kind in kinds:
        if kind.startswith("attention"):
            yield from _attention_groups(family, block, names, kind)
        else:
            yield from _feed_forward_groups(family, block, names, kind)


def _attention_groups(
    family: Family, block: str, names: Sequence[str], kind: SmoothingKind
) -> Iterator[SmoothingGroup]:
    """norm -> q, k, v, or v -> o: attention mixes tokens, not channels.

    Of latent attention norm -> q and kv_a, or the norm between the two projections of q -> q_b.
    What reads the latent multiplies what is cached and has no input of its own to be smoothed.
    """
    norm, attention = family.norms.before_attention, family.attention
    module = f"{block}.{attention.module}"
    if kind == "attention_input":
        if norm is not None:
            inputs = (f"{module}.{part}" for part in attention.inputs)
            consumers = tuple(name for name in inputs if name in names)
            source, offset = f"{block}.{norm}", family.norms.offset
            yield SmoothingGroup(
                kind=kind, block=block, source=source, consumers=consumers, offset=offset
            )
        if isinstance(attention, LatentAttention) and f"{module}.{attention.q_b}" in names:
            source, consumers = f"{module}.{attention.q_norm}", (f"{module}.{attention.q_b}",)
            yield SmoothingGroup(kind=kind, block=block, source=source, consumers=consumers)
    elif not isinstance(attention, LatentAttention):
        source, consumers = f"{module}.{attention.v}", (f"{module}.{attention.o}",)
        yield SmoothingGroup(kind=kind, block=block, source=source, consumers=consumers)


def _feed_forward_groups(
    family: Family, block: str, names: Sequence[str], kind: SmoothingKind
) -> Iterator[SmoothingGroup]:
    """norm -> every gate and up, or each layer's up -> down."""
    norm, layers = family.norms.before_feed_forward, list(feed_forward_layers(family, names))
    if kind == "mlp_output":
        for layer in layers:
            of_expert = expert_of(layer.gate) is not None
            if of_expert and family.mixture is not None and family.mixture.clamped is not None:
                continue  # one more than up, and bounded, is multiplied: no factor goes through
            tied = any_expert(layer.up) if of_expert else None
            consumers = (layer.down,)
            yield SmoothingGroup(
                kind=kind, block=block, source=layer.up, consumers=consumers, tied=tied
            )
    elif norm is not None:
        consumers = tuple(part for layer in layers for part in (layer.gate, layer.up))
        routers = tuple(filter(is_router, names))
        yield SmoothingGroup(
            kind=kind,
            block=block,
            source=f"{block}.{norm}",
            consumers=consumers,
            routers=routers,
            offset=family.norms.offset,
        )
