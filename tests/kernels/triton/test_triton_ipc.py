"""Memory that ranks share, with a driver that stands for CUDA's: what it is asked, and what is said
where it refuses."""

import ctypes
import gc
from contextlib import nullcontext

import pytest
import torch

import kernels.devices
from kernels.triton.collective import memory as ipc

CPU = torch.device("cpu")


class Driver:
    """Memory of the host, by handles that hold its address."""

    def __init__(self, refuses: str = ""):
        self.calls, self._refuses, self._held = [], refuses, {}

    def __getitem__(self, name: str):
        return lambda *arguments: self._call(name, *arguments)

    def cuGetErrorString(self, code, text):  # noqa: N802
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"peer access is not supported"

    def _call(self, name: str, *arguments) -> int:
        if name == self._refuses:
            return 217
        first = arguments[0]
        if name == "cuMemAlloc_v2":
            memory = ctypes.create_string_buffer(b"x" * arguments[1].value, arguments[1].value)
            first._obj.value = ctypes.addressof(memory)
            self._held[first._obj.value] = memory
            self.calls.append((name, arguments[1].value))
        elif name == "cuIpcGetMemHandle":
            first._obj.reserved = str(arguments[1].value).encode()
        elif name == "cuIpcOpenMemHandle_v2":
            first._obj.value = int(arguments[1].reserved)
            self.calls.append((name, arguments[2].value))
        else:
            self.calls.append((name, first.value))
        return 0


@pytest.fixture
def driver(monkeypatch):
    def start(refuses: str = "") -> Driver:
        made = Driver(refuses)
        for module in (kernels.devices, ipc):
            monkeypatch.setattr(module, "cuda_driver", lambda: made)
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        return made

    return start


def test_what_one_writes_the_other_reads_until_both_end(driver):
    calls = driver().calls
    own = ipc.Region.made(1000, CPU)
    place = own.data.data_ptr()
    assert not own.data.any(), "memory is zero at first"
    assert calls == [("cuMemAlloc_v2", 2 << 20)], "a page of its own"
    peer = ipc.Region.opened(own.handle, 1000, CPU)
    assert peer.data.shape == own.data.shape == (1000,)
    peer.data[999] = 7
    assert own.data[999] == 7
    del peer
    gc.collect()
    assert calls[1:] == [("cuIpcOpenMemHandle_v2", 1), ("cuIpcCloseMemHandle", place)]
    del own
    gc.collect()
    assert calls[-1] == ("cuMemFree_v2", place)


def test_a_driver_that_refuses_is_named(driver):
    driver("cuIpcOpenMemHandle_v2")
    own = ipc.Region.made(8, CPU)
    message = (
        "cuIpcOpenMemHandle_v2 gave 217, peer access is not supported. Ranks must be processes"
    )
    with pytest.raises(RuntimeError, match=message):
        ipc.Region.opened(own.handle, 8, CPU)
