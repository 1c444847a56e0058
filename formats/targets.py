"""Patterns for exactly some linear layers, as the targets of compressed-tensors' groups.

Some readers see a model's layers by the names in its checkpoint, others by those of the layers that
they fuse (vLLM and SGLang: `qkv_proj`, `gate_up_proj`). A pattern that names the parts and the
fused layer means the same to both:

    re:.*layers\\.(0|3)\\.self_attn\\.(q_proj|k_proj|v_proj|qkv_proj)$

No pattern of a group matches a layer of another one, so that their order means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:(.+)\.)?([^.]+)")
FUSED = {
    frozenset(("q_proj", "k_proj", "v_proj")): "qkv_proj",
    frozenset(("gate_proj", "up_proj")): "gate_up_proj",
    frozenset(("w1", "w3")): "w13",
}


def layer_targets(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Patterns for `re.match` that mean each group's layers, and none of the other groups'.

    Args:
        groups: Full names of linear layers of decoder blocks, such as
            `model.layers.0.mlp.down_proj`. Layers that are fused at run time are of one group.
    """
    places = [_places(names) for names in groups]
    return [
        [
            _pattern(blocks, module, leaves)
            for (module, blocks), leaves in _by_leaves(mine, [p for p in places if p is not mine])
        ]
        for mine in places
    ]


def _places(names: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Indices of the blocks in which each (module, leaf) of a block is."""
    places: dict[tuple[str, str], list[str]] = {}
    for name in names:
        match = NAME.fullmatch(name)
        assert match is not None, name
        places.setdefault((match[2] or "", match[3]), []).append(match[1])
    return places


def _by_leaves(
    mine: dict[tuple[str, str], list[str]], others: list[dict[tuple[str, str], list[str]]]
) -> list[tuple[tuple[str, tuple[str, ...]], list[str]]]:
    """Leaves of one module and the same blocks together; no blocks where no other group has any."""
    together: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (module, leaf), blocks in mine.items():
        alone = not any((module, leaf) in other for other in others)
        together.setdefault((module, () if alone else tuple(blocks)), []).append(leaf)
    return list(together.items())


def _pattern(blocks: tuple[str, ...], module: str, leaves: list[str]) -> str:
    fused = [name for parts, name in FUSED.items() if parts <= set(leaves)]
    where = f"({'|'.join(blocks)})" if blocks else r"\d+"
    inside = re.escape(f"{module}.") if module else ""
    return rf"re:.*layers\.{where}\.{inside}({'|'.join([*leaves, *fused])})$"
