"""The layers of a decoder block: what their names tell, and which of them belong together.

Full names are those that checkpoints have: `model.layers.3.self_attn.q_proj` is a module,
`model.layers.3.self_attn.q_proj.weight` its tensor, `model.layers.3` the block of both. A name
alone tells the block, the expert, and whether a layer can be quantized.

By the family's declaration some are merged into one at run time, some read one input, and some are
smoothed through one source. A block has one feed-forward layer, or many: experts, and a shared one
beside them. All of them, and the routers that weigh them, read what the norm before them hands
over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from formats.documents import Strict
from formats.families.family import Family, GatedMLP, LatentAttention, Role
from formats.families.registry import FAMILIES

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")
_IN_BLOCK = re.compile(r"(?:[^.]+\.)*?[^.]+\.(\d+)\.(?:(.+)\.)?([^.]+)")
_EXPERT = re.compile(r"\.experts\.(\d+)(?=\.)")
_MIXTURES = tuple(family.mixture for family in FAMILIES if family.mixture)
_EXPERT_LEAVES = {leaf for m in _MIXTURES for leaf in (*m.expert.gate_up, m.expert.down)}
_ROUTERS = {f"{mixture.module}.{router}" for mixture in _MIXTURES for router in mixture.routers}
_ROLES: dict[str, Role] = {}
for _family in FAMILIES:
    _ROLES |= _family.attention.roles
    for _layer in _family.feed_forwards:
        _ROLES |= {_layer.gate: "gate", _layer.up: "up", _layer.down: "down"}
_WEIGHT_ONLY = {leaf for family in FAMILIES for leaf in family.weight_only}
_LINEARS = {leaf for family in FAMILIES for leaf in family.attention.roles}
MERGED: dict[str, tuple[str, ...]] = dict(
    sorted({row for family in FAMILIES for row in family.merged}, reverse=True)
)
"""Layers that runtimes multiply as one outside of experts: names of the parts by its own."""
MERGED_EXPERTS: dict[str, tuple[str, ...]] = {
    mixture.expert.merged: mixture.expert.gate_up for mixture in _MIXTURES
}
"""The same of an expert's layers."""


def split_name(name: str) -> tuple[str, str, str] | None:
    """Index of a module's block, the path of its parent there, its own name; None outside.

    The path is empty where the parent is the block itself, as it is of norms.
    """
    match = _IN_BLOCK.fullmatch(name)
    return None if match is None else (match[1], match[2] or "", match[3])


def block_of(name: str) -> str | None:
    """Full name of the decoder block that a module or tensor is in; None outside of them."""
    match = _BLOCK.match(name)
    return None if match is None else match[0]


def by_block(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of modules or tensors by their decoder block; "" for those outside."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(block_of(name) or "", []).append(name)
    return grouped


def expert_of(name: str) -> int | None:
    """Which expert a layer belongs to; None where it belongs to none, or to a shared one."""
    match = _EXPERT.search(name)
    return None if match is None else int(match[1])


def any_expert(name: str, stand_in: str = ".*") -> str:
    """A name with what stands for every expert in place of the expert's index."""
    return _EXPERT.sub(f".experts{stand_in}", name)


def is_shared_expert(name: str) -> bool:
    """Whether a layer belongs to an expert that sees every token."""
    return any(m.shared is not None and f".{m.shared}." in name for m in _MIXTURES)


def role_of(module: str) -> Role | None:
    """What a linear layer is in its block, whatever its family calls it; None of other modules."""
    return _ROLES.get(module.rpartition(".")[2])


def is_projection(module: str) -> bool:
    """Whether a full name is that of a linear layer of a decoder block that can be quantized."""
    leaf = module.rpartition(".")[2]
    if leaf.endswith("_proj") or leaf in _LINEARS:
        return True
    return leaf in _EXPERT_LEAVES and expert_of(module) is not None


def is_weight_only(module: str) -> bool:
    """Whether a full name is that of a layer of which the weight alone can be quantized."""
    return module.rpartition(".")[2] in _WEIGHT_ONLY


def is_router(module: str) -> bool:
    """Whether a full name is that of a layer that says how much an expert counts."""
    return ".".join(module.split(".")[-2:]) in _ROUTERS


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
