"""What a name alone tells: which block, which expert, whether a layer can be quantized.

Full names are those that checkpoints have: `model.layers.3.self_attn.q_proj` is a module,
`model.layers.3.self_attn.q_proj.weight` its tensor, `model.layers.3` the block of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from formats.families.family import Role
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
