"""Patterns for exactly some linear layers, as the targets of compressed-tensors' groups.

Some readers see a model's layers by the names in its checkpoint, others by those of the layers that
they merge (vLLM and SGLang: `qkv_proj`, `gate_up_proj`). A pattern that names the parts and the
merged layer means the same to both:

    re:.*layers\\.(0|3)\\.self_attn\\.(q_proj|k_proj|v_proj|qkv_proj)$

The head is beside the blocks and is named alone, by the end of its name. Layers that predict
further tokens may be in a list of their own (`mtp.layers`, `model.mtp_layers`), whose name then
tells them from the blocks. No pattern of a group matches a layer of another one, so that their
order means nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from formats.families.block_layers import (
    MERGED,
    MERGED_EXPERTS,
    any_expert,
    block_of,
    expert_of,
    split_name,
)
from formats.families.registry import numbered_on, predicting_layer

Place = tuple[str, str, str, str]  # pattern of the list, index there, path in the block, own name


def layer_targets(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Patterns for `re.match` that mean each group's layers, and none of the other groups'.

    Args:
        groups: Full names of linear layers of decoder blocks, such as
            `model.layers.0.mlp.down_proj`, and of the head. Layers that are merged at run time are
            of one group.
    """
    split = [[(name, split_name(name)) for name in names] for names in groups]
    lists = _lists(name for names in split for name, part in names if part is not None)
    parts = [[(lists[_list(n)], *part) for n, part in names if part is not None] for names in split]
    owners: dict[tuple[str, ...], set[int]] = {}
    for i, layers in enumerate(parts):
        for where, block, module, leaf in layers:
            owners.setdefault((where, block, _starred(module), leaf), set()).add(i)
            owners.setdefault((where, _starred(module), leaf), set()).add(i)
    targets = [_targets(i, layers, owners) for i, layers in enumerate(parts)]
    heads = ([rf"re:.*{re.escape(name)}$" for name, part in own if part is None] for own in split)
    return [of_blocks + head for of_blocks, head in zip(targets, heads, strict=True)]


def _list(module: str) -> str:
    """Full name of the list of blocks that a module is in."""
    return (block_of(module) or "").rpartition(".")[0]


def _lists(modules: Iterable[str]) -> dict[str, str]:
    """For each list that modules are in, a pattern that ends the names of no other one.

    The list of most of them has its own name alone, before which that of another may not stand.
    """
    count = Counter(map(_list, modules))
    (main, *others) = sorted(count, key=lambda path: -count[path]) or [""]
    own, found, preceding = main.rpartition(".")[2], dict[str, str](), ""
    for path in others:
        name = path.rpartition(".")[2]
        ending = ".".join(path.split(".")[-2:]) if name == own else name
        found[path] = re.escape(ending)
        if ending.endswith(own):
            preceding += f"(?<!{re.escape(ending.removesuffix(own))})"
    return {main: preceding + re.escape(own), **found}


def served_names(config: Mapping[str, Any], modules: Iterable[str]) -> list[str]:
    """Other names that vLLM has for modules of layers that predict further tokens.

    These may be numbered on after the last block, and their classes, unlike those of whole models,
    do not tell which layers they merge. Source: vLLM 0.33, `deepseek_mtp.py`, `glm4_moe_mtp.py`,
    `mimo_mtp.py`, `qwen3_next_mtp.py` and `qwen3_5_mtp.py` of its models.

    Args:
        config: config.json of the model.
        modules: Full names, in the files; patterns have no others.
    """
    found = dict[str, None]()
    for module in modules:
        if predicting_layer(config, module) is not None:
            parent, _, leaf = numbered_on(config, module).rpartition(".")
            alone = expert_of(module) is not None  # experts are looked up one by one
            merged = [whole for whole, own in MERGED.items() if leaf in own and not alone]
            found |= dict.fromkeys(f"{parent}.{name}" for name in (leaf, *merged))
    return list(found)


def is_ignored(module: str, ignore: Sequence[str]) -> bool:
    """Whether an `ignore` list names a module: its full name, or `re:` and a pattern."""
    for entry in ignore:
        if entry.startswith("re:"):
            if re.match(entry[3:], module):
                return True
        elif entry == module:
            return True
    return False


def last_match(module: str, lists: Iterable[Sequence[str]]) -> int | None:
    """Index of the last of several such lists that names a module; None where none does."""
    return max((i for i, own in enumerate(lists) if is_ignored(module, own)), default=None)


def _starred(module: str) -> str:
    return any_expert(f".{module}.").strip(".")


def _targets(
    group: int, layers: Sequence[Place], owners: Mapping[tuple[str, ...], set[int]]
) -> list[str]:
    """Patterns of one group; blocks and experts are numbered where other groups have some."""
    places: dict[tuple[str, str, str], dict[str, None]] = {}
    for where, block, module, leaf in layers:
        whole = owners[where, block, _starred(module), leaf] == {group}
        starred = _starred(module) if whole else module
        places.setdefault((where, starred, leaf), {})[block] = None
    together: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (where, module, leaf), blocks in places.items():
        alone = owners[where, _starred(module), leaf] == {group}
        together.setdefault((where, module, () if alone else tuple(blocks)), []).append(leaf)
    return [_pattern(*place, leaves) for place, leaves in together.items()]


def _pattern(blocks_list: str, module: str, blocks: tuple[str, ...], leaves: list[str]) -> str:
    merged = [name for name, parts in (MERGED | MERGED_EXPERTS).items() if {*parts} <= {*leaves}]
    where = f"({'|'.join(blocks)})" if blocks else r"\d+"
    inside = re.escape(module).replace(r"\*", r"\d+") + (r"\." if module else "")
    return rf"re:.*{blocks_list}\.{where}\.{inside}({'|'.join([*leaves, *merged])})$"
