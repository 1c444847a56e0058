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
        gpus: The GPUs that it sees, as CUDA_VISIBLE_DEVICES has them; None for all.
    """

    device: str
    cores: tuple[int, ...] | None = None
    gpus: tuple[str, ...] | None = None


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def places(
    device: str, engines: int, cores: Sequence[int], ranks: int = 1, visible: str | None = None
) -> list[Place]:
    """A place for each engine.

    Args:
        device: `cpu`, whose cores are divided; `cuda` or `cuda:K`: GPUs from the first or from
            number K on, one for each rank of an engine.
        engines: How many.
        cores: Numbers of the CPU's cores; neighbours stay together, since they share caches.
        ranks: Processes of an engine, each on a GPU of its own.
        visible: What CUDA_VISIBLE_DEVICES says, if anything.

    Raises:
        RequestError: there are fewer cores than engines, or fewer GPUs than their ranks.
    """
    kind, _, number = device.partition(":")
    if engines == 1:
        return [Place(device)]
    if kind != "cpu":
        first = int(number or 0)
        if ranks == 1:
            return [Place(f"{kind}:{first + i}") for i in range(engines)]
        return _of_several_gpus(kind, first, engines, ranks, visible)
    if engines > len(cores):
        raise RequestError(
            f"--data-parallel {engines}: on a CPU each engine needs a core, and this process may "
            f"use {len(cores)}; lower it"
        )
    ends = [len(cores) * i // engines for i in range(engines + 1)]
    return [Place(device, tuple(cores[start:end])) for start, end in pairwise(ends)]


def _of_several_gpus(
    kind: str, first: int, engines: int, ranks: int, visible: str | None
) -> list[Place]:
    """Places of engines that see the GPUs of their own ranks alone, from the first on."""
    last = first + engines * ranks
    names = visible.split(",") if visible else list(map(str, range(last)))
    if len(names) < last:
        raise RequestError(
            f"--data-parallel {engines} --tensor-parallel {ranks}: that takes {engines * ranks} "
            f"GPUs from number {first} on, and CUDA_VISIBLE_DEVICES names {len(names)}"
        )
    starts = range(first, last, ranks)
    return [Place(kind, gpus=tuple(names[start : start + ranks])) for start in starts]
