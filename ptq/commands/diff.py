"""`ptq diff`: what differs between two recipes, or between two checkpoints.

    ptq diff A.yaml B.yaml
    ptq diff CHECKPOINT_A CHECKPOINT_B [--top N]

Recipes are compared as they resolve, with bases, presets and defaults spelled out. Checkpoints are
compared by scheme, by the tensors that they hold, and by their scales. Exit code 0 where nothing
differs, 1 where something does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from formats.command import CommandParser, count
from formats.errors import RequestError
from formats.hub import near_folder
from formats.namespace import later
from ptq.recipe.own_model import find_recipe
from ptq.recipe.reading import load_recipe

with later():
    import torch

    from formats.checkpoint import read


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq diff`."""
    summary = (__doc__ or "").split("\n\n")[0]
    made = CommandParser(prog="ptq diff", description=summary)
    made.add_argument("a", type=Path, help="recipe or folder of a checkpoint")
    made.add_argument("b", type=Path, help="recipe or folder to compare it with")
    made.add_argument("--top", type=count, default=10, help="tensors listed of each kind")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print what differs; 0 where nothing does, 1 where something does."""
    arguments = parser().parse_args(argv)
    if _are_folders(arguments.a, arguments.b):
        a, b = (read.Checkpoint.open(path) for path in (arguments.a, arguments.b))
        lines = diff_checkpoints(a, b, arguments.top)
    else:
        both = (load_recipe(path).model_dump(mode="json") for path in (arguments.a, arguments.b))
        lines = list(diff_values(*map(flatten, both)))
    print("\n".join(lines) if lines else "no difference")
    return 1 if lines else 0


def _are_folders(a: Path, b: Path) -> bool:
    """Whether two checkpoints are compared, and not two recipes.

    Raises:
        RequestError: neither.
    """
    folders = [path for path in (a, b) if path.is_dir()]
    if len(folders) != 1:
        return bool(folders)
    other = b if a.is_dir() else a
    if not find_recipe(other).exists():
        raise RequestError(f"{other}: no such folder; {near_folder(other)}give two checkpoints")
    raise RequestError(
        f"{folders[0]} is a folder and {other} is not. Give two recipes, or the folders of two "
        "checkpoints"
    )


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Leaves of nested mappings and lists by their dotted key."""
    items: Iterator[tuple[Any, Any]]
    if isinstance(value, dict) and value:
        items = iter(value.items())
    elif isinstance(value, list | tuple) and value:
        items = iter(enumerate(value))
    else:
        return {key: value}
    leaves: dict[str, Any] = {}
    for part, inner in items:
        leaves |= flatten(inner, f"{key}.{part}" if key else str(part))
    return leaves


def diff_values(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """A line for each key whose value differs, or that only one has; null and empty is absent."""
    for key in a | b:
        values = (side.get(key) for side in (a, b))
        left, right = ("absent" if own in (None, [], {}) else repr(own) for own in values)
        if left != right:
            yield f"{key}: {left} -> {right}"


def diff_checkpoints(a: read.Checkpoint, b: read.Checkpoint, top: int = 10) -> list[str]:
    """What differs between two checkpoints: scheme, tensors, scales.

    Args:
        top: Tensors that are listed of each kind of difference, the largest first.
    """
    schemes = [flatten(side.scheme.model_dump(mode="json"), "scheme") for side in (a, b)]
    lines = list(diff_values(*schemes))
    apart = sorted(set(a.own_schemes) | set(b.own_schemes))
    lines += diff_values(
        *({f"scheme of {n}": side.scheme_of(n).text for n in apart} for side in (a, b))
    )
    first, second = set(a.names()), set(b.names())
    lines += _listed("only in the first", sorted(first - second), top)
    lines += _listed("only in the second", sorted(second - first), top)
    changed, scales = [], []
    for name in sorted(first & second):
        if (a.dtype(name), a.shape(name)) != (b.dtype(name), b.shape(name)):
            changed.append((2.0, f"{name}: {_kind(a, name)} -> {_kind(b, name)}"))
            continue
        left, right = a.tensor(name), b.tensor(name)
        share = (left.view(torch.uint8) != right.view(torch.uint8)).float().mean().item()
        if share and name.endswith("_scale"):
            scales.append(_ratio(name, left.float(), right.float()))
        elif share:
            same = (left.float() == right.float()).float().mean().item()
            changed.append((1 - same, f"{name}: {1 - same:.2%} of its values differ"))
    for attention in sorted(set(a.kv_scales) & set(b.kv_scales)):
        for role, x, y in zip("kv", a.kv_scales[attention], b.kv_scales[attention], strict=True):
            if x.shape != y.shape or not torch.equal(x, y):
                name = f"{attention}.{role}_scale"
                scales.append(
                    _ratio(name, x, y) if x.shape == y.shape else (9.0, f"{name}: other shape")
                )
    lines += _listed("tensors that differ", _by_size(changed), top)
    lines += _listed("scales that differ", _by_size(scales), top)
    return lines


def _ratio(name: str, a: torch.Tensor, b: torch.Tensor) -> tuple[float, str]:
    ratio = b / a
    low, high = ratio.min().item(), ratio.max().item()
    return max(high, 1 / low) - 1, f"{name}: x {low:.4g} to {high:.4g}"


def _by_size(rows: list[tuple[float, str]]) -> list[str]:
    return [text for _, text in sorted(rows, key=lambda row: -row[0])]


def _listed(title: str, rows: list[str], top: int) -> list[str]:
    if not rows:
        return []
    more = [f"  and {len(rows) - top} more"] if len(rows) > top else []
    return [f"{title} ({len(rows)})", *(f"  {row}" for row in rows[:top]), *more]


def _kind(checkpoint: read.Checkpoint, name: str) -> str:
    dtype = str(checkpoint.dtype(name)).removeprefix("torch.")
    return f"{dtype} {list(checkpoint.shape(name))}"
