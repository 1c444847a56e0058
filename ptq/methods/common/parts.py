"""Parts of a block that are solved side by side, on several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from formats.families.groups import SmoothingGroup
from ptq.methods.common.block import BlockWork


@dataclass(frozen=True)
class Part:
    """Some of a block's layers, or some of its smoothing groups.

    Attributes:
        told: What a person calls it.
        cost: How long it takes, in any unit.
        targets: Full names of the layers; None for all.
        groups: The groups; None for all.
    """

    told: str
    cost: float
    targets: tuple[str, ...] | None = None
    groups: tuple[SmoothingGroup, ...] | None = None


def layers_by_input(work: BlockWork) -> dict[str, dict[str, list[str]]]:
    """A block's targets by what they read (`BlockWork.observed_for`) and by their module."""
    stand_in, found = work.observed_for, dict[str, dict[str, list[str]]]()
    for name in work.targets:
        modules = found.setdefault(stand_in[name], {})
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def layer_parts(work: BlockWork, most: int) -> list[Part]:
    """Layers that are solved without each other; those of one module and input stay together.

    Args:
        work: The block at work.
        most: Parts into which the layers that read one input, as experts do, are divided: what
            follows from that input is found once for each.
    """
    parts = []
    for modules in layers_by_input(work).values():
        each = list(modules.values())
        size = -(-len(each) // most)
        for start in range(0, len(each), size):
            names = [name for module in each[start : start + size] for name in module]
            cost = sum(_cost(work, name) for name in names)
            parts.append(Part(_told(names), cost, targets=tuple(names)))
    return parts


def group_parts(groups: Mapping[str, Sequence[SmoothingGroup]]) -> list[Part]:
    """Smoothing groups that are searched without each other, by what they are called."""
    return [Part(name, 1.0, groups=tuple(own)) for name, own in groups.items()]


def _cost(work: BlockWork, name: str) -> float:
    """Of solving a layer [N, K]: every column moves those after it, in all rows."""
    rows, columns = work.block.linears[name].weight.shape
    return float(columns) * columns * (rows + columns / 3)


def _told(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
