"""Patterns for exactly some linear layers, as the targets of compressed-tensors' groups.

Some readers see a model's layers by the names in its checkpoint, others by those of the layers that
they merge (vLLM and SGLang: `qkv_proj`, `gate_up_proj`). A pattern that names the parts and the
merged layer means the same to both:

    re:.*layers\\.(0|3)\\.self_attn\\.(q_proj|k_proj|v_proj|qkv_proj)$

The head is beside the blocks and is named alone, by the end of its name. No pattern of a group
matches a layer of another one, so that their order means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from formats.families.names import MERGED, MERGED_EXPERTS, any_expert, list_of, split_name


def layer_targets(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Patterns for `re.match` that mean each group's layers, and none of the other groups'.

    Args:
        groups: Full names of linear layers of decoder blocks, such as
            `model.layers.0.mlp.down_proj`, and of the head. Layers that are merged at run time are
            of one group.
    """
    split = [[(name, split_name(name)) for name in names] for names in groups]
    parts = [[part for _, part in names if part is not None] for names in split]
    owners: dict[tuple[str, ...], set[int]] = {}
    for i, layers in enumerate(parts):
        for block, module, leaf in layers:
            owners.setdefault((block, _starred(module), leaf), set()).add(i)
            owners.setdefault((_starred(module), leaf), set()).add(i)
    lists = [list_of(name) for names in split for name, part in names if part is not None]
    blocks = lists[0] if lists else "layers"
    targets = [_targets(i, layers, owners, blocks) for i, layers in enumerate(parts)]
    heads = ([rf"re:.*{re.escape(name)}$" for name, part in own if part is None] for own in split)
    return [of_blocks + head for of_blocks, head in zip(targets, heads, strict=True)]


def is_ignored(module: str, ignore: Sequence[str]) -> bool:
    """Whether an `ignore` list names a module: its full name, or `re:` and a pattern."""
    for entry in ignore:
        if entry.startswith("re:"):
            if re.match(entry[3:], module):
                return True
        elif entry == module:
            return True
    return False


def _starred(module: str) -> str:
    return any_expert(f".{module}.").strip(".")


def _targets(
    group: int,
    layers: Sequence[tuple[str, str, str]],
    owners: Mapping[tuple[str, ...], set[int]],
    blocks_list: str,
) -> list[str]:
    """Patterns of one group; blocks and experts are numbered where other groups have some."""
    places: dict[tuple[str, str], dict[str, None]] = {}
    for block, module, leaf in layers:
        whole = owners[block, _starred(module), leaf] == {group}
        places.setdefault((_starred(module) if whole else module, leaf), {})[block] = None
    together: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (module, leaf), blocks in places.items():
        alone = owners[_starred(module), leaf] == {group}
        together.setdefault((module, () if alone else tuple(blocks)), []).append(leaf)
    return [
        _pattern(blocks_list, module, blocks, leaves)
        for (module, blocks), leaves in together.items()
    ]


def _pattern(blocks_list: str, module: str, blocks: tuple[str, ...], leaves: list[str]) -> str:
    merged = [name for name, parts in (MERGED | MERGED_EXPERTS).items() if {*parts} <= {*leaves}]
    where = f"({'|'.join(blocks)})" if blocks else r"\d+"
    inside = re.escape(module).replace(r"\*", r"\d+") + (r"\." if module else "")
    return rf"re:.*{blocks_list}\.{where}\.{inside}({'|'.join([*leaves, *merged])})$"
