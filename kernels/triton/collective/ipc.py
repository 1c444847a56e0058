"""Memory of a GPU that processes of the same host write: CUDA's IPC handles, by the driver.

torch's symmetric memory does not serve here: it numbers the meetings of ranks over the life of a
process, and a process that has met ranks before waits for ever for new ones, which begin at zero.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import torch
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
