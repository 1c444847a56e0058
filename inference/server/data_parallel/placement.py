"""Where the engines of a server run: each on a GPU of its own, or on a part of the CPU's cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from formats.errors import RequestError


@dataclass(frozen=True)
class Place:
    """Where an engine runs.

    Attributes:
        device: `cpu` or `cuda:N`; `cuda` where there is one engine, which takes the first.
        cores: Numbers of the cores that it may use; None for all.
    """

    device: str
    cores: tuple[int, ...] | None = None


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def places(device: str, engines: int, cores: Sequence[int]) -> list[Place]:
    """A place for each engine.

    Args:
        device: `cpu`, whose cores are divided; `cuda` or `cuda:K`: GPUs from the first or from
            number K on, one for each.
        engines: How many.
        cores: Numbers of the CPU's cores; neighbours stay together, since they share caches.

    Raises:
        RequestError: there are fewer cores than engines.
    """
    kind, _, number = device.partition(":")
    if engines == 1:
        return [Place(device)]
    if kind != "cpu":
        first = int(number or 0)
        return [Place(f"{kind}:{first + i}") for i in range(engines)]
    if engines > len(cores):
        raise RequestError(
            f"--data-parallel {engines}: on a CPU each engine needs a core, and this process may "
            f"use {len(cores)}; lower it"
        )
    ends = [len(cores) * i // engines for i in range(engines + 1)]
    return [Place(device, tuple(cores[start:end])) for start, end in pairwise(ends)]
