"""Memory of each rank that its peers write: of GPUs of a host, or of ranks of one process.

A rank's region is cut into

    words     int64 [2, ranks, few, hidden]     of the one-shot kernel
    arrived   int32 [most, ranks]               of the two-shot kernel: whose part has come
    done      int32 [most]                      whose result has come
    parts     [own rows, ranks, hidden] of at most 4 bytes
    totals    [2, most, hidden] of 2 bytes      results; calls take the two in turn
    rows      [2, most, hidden] of at most 2 bytes
    scales    fp32 [2, most, hidden / 128]

Processes of a host write each other's memory by CUDA's IPC handles, which the driver gives. torch's
symmetric memory does not serve here: it numbers the meetings of ranks over the life of a process,
and a process that has met ranks before waits for ever for new ones, which begin at zero.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, prod

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.devices import call_driver, cuda_driver

PAGE = 2 << 20  # bytes; what is smaller may share its page, and then the handle is the page's
PEER_ACCESS = 1  # opened memory may lie on another GPU


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, which is given by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


@dataclass(frozen=True)
class Region:
    """Memory of this process or of another one.

    Attributes:
        data: uint8, zero at first; it ends with the region.
    """

    data: Tensor

    @classmethod
    def made(cls, nbytes: int, device: torch.device) -> Region:
        """Of this process."""
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # the context is there
            place, whole = ctypes.c_uint64(), ctypes.c_size_t(-(-nbytes // PAGE) * PAGE)
            _call("cuMemAlloc_v2", ctypes.byref(place), whole)
            made = cls(_tensor(place.value, nbytes, device))
            made._ends_by("cuMemFree_v2", device)
            made.data.zero_()
            torch.cuda.synchronize()
        return made

    @classmethod
    def opened(cls, handle: bytes, nbytes: int, device: torch.device) -> Region:
        """Of another process, by its `handle`; `device` is the one that writes it."""
        with torch.cuda.device(device):
            place, own = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(place), own, ctypes.c_uint(PEER_ACCESS))
            opened = cls(_tensor(place.value, nbytes, device))
            opened._ends_by("cuIpcCloseMemHandle", device)
        return opened

    def _ends_by(self, name: str, device: torch.device) -> None:
        """Have the driver called when it ends, or all with the process."""
        weakref.finalize(self, _free, name, self.data.data_ptr(), device).atexit = False

    @property
    def handle(self) -> bytes:
        """By which other processes open it."""
        own = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(own), ctypes.c_uint64(self.data.data_ptr()))
        return bytes(own)


def _tensor(place: int, nbytes: int, device: torch.device) -> Tensor:
    storage = torch._C._construct_storage_from_data_pointer(place, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _free(name: str, place: int, device: torch.device) -> None:
    """Once the device has done all; where that fails, the memory ends with the process."""
    with torch.cuda.device(device):
        cuda_driver()[name](ctypes.c_uint64(place))


def _call(name: str, *arguments: object) -> None:
    """Call the driver.

    Raises:
        RuntimeError: it refuses.
    """
    try:
        call_driver(name, *arguments)
    except RuntimeError as error:
        raise RuntimeError(
            f"GPUs share no memory: {error}. Ranks must be processes of one machine, in one IPC "
            "namespace, whose GPUs reach each other's memory (nvidia-smi topo -p2p w)"
        ) from error


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
