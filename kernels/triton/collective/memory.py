"""Memory of each rank that its peers write: of GPUs of a host, or of ranks of one process.

A rank's region is cut into

    words     int64 [2, ranks, few, hidden]     of the one-shot kernel
    arrived   int32 [most, ranks]               of the two-shot kernel: whose part has come
    done      int32 [most]                      whose result has come
    parts     [own rows, ranks, hidden] of at most 4 bytes
    totals    [2, most, hidden] of 2 bytes      results; calls take the two in turn
    rows      [2, most, hidden] of at most 2 bytes
    scales    fp32 [2, most, hidden / 128]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, prod

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.triton.collective.ipc import Region

LINE = 256  # bytes; parts of a region start at multiples of it


@dataclass(frozen=True)
class Sizes:
    """What a region has room for.

    Attributes:
        ranks: That sum.
        hidden: Elements of a row.
        few: Rows of the one-shot kernel.
        most: Rows of the two-shot kernel.
    """

    ranks: int
    hidden: int
    few: int
    most: int

    @cached_property
    def parts(self) -> dict[str, tuple[int, int]]:
        """First byte and number of bytes of each part of a region."""
        runs, own = ceil(self.hidden / 128), ceil(self.most / self.ranks)
        nbytes = {
            "words": 8 * 2 * self.ranks * self.few * self.hidden,
            "arrived": 4 * self.most * self.ranks,
            "done": 4 * self.most,
            "parts": 4 * own * self.ranks * self.hidden,
            "totals": 2 * 2 * self.most * self.hidden,
            "rows": 2 * 2 * self.most * self.hidden,
            "scales": 2 * 4 * self.most * runs,
        }
        parts, place = {}, 0
        for name, size in nbytes.items():
            parts[name] = place, size
            place += ceil(size / LINE) * LINE
        return parts

    @property
    def nbytes(self) -> int:
        """Of a region."""
        first, size = self.parts["scales"]
        return first + size


@dataclass(frozen=True)
class SharedMemory:
    """The regions of all ranks as one of them sees them.

    Attributes:
        rank: Whose view this is.
        regions: uint8, of every rank; zero at first.
        sizes: How they are cut.
        held: What ends with this.
    """

    rank: int
    regions: tuple[Tensor, ...]
    sizes: Sizes
    held: tuple[Region, ...] = ()
    _flat: dict[tuple[str, torch.dtype, int], tuple[Tensor, ...]] = field(default_factory=dict)

    def views(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None, half: int = 0
    ) -> tuple[Tensor, ...]:
        """A part of every rank's region, or the start of one of its halves, as a tensor."""
        key = name, dtype, half
        if key not in self._flat:
            first, size = self.sizes.parts[name]
            first += half * (size // 2)
            views = (region[first : first + size - half * (size // 2)] for region in self.regions)
            self._flat[key] = tuple(view.view(dtype) for view in views)
        flat = self._flat[key]
        return flat if shape is None else tuple(each[: prod(shape)].view(shape) for each in flat)


def over_group(group: dist.ProcessGroup, device: torch.device, sizes: Sizes) -> SharedMemory:
    """Regions of the GPUs of a group's ranks, which all call this at once."""
    own, rank = Region.made(sizes.nbytes, device), dist.get_rank(group)
    handles: list[bytes] = [b""] * sizes.ranks
    dist.all_gather_object(handles, own.handle, group)  # no peer writes before all is zero
    held = tuple(
        own if peer == rank else Region.opened(handle, sizes.nbytes, device)
        for peer, handle in enumerate(handles)
    )
    return SharedMemory(rank, tuple(region.data for region in held), sizes, held)


def of_one_process(device: torch.device, sizes: Sizes) -> list[SharedMemory]:
    """Regions of ranks that are streams of one device, or processes forked from this one."""
    regions = tuple(
        torch.zeros(sizes.nbytes, dtype=torch.uint8, device=device) for _ in range(sizes.ranks)
    )
    if device.type == "cpu":
        regions = tuple(region.share_memory_() for region in regions)
    return [SharedMemory(rank, regions, sizes) for rank in range(sizes.ranks)]
