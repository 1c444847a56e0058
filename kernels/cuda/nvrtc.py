"""CUDA C++ that is compiled where it runs, by NVRTC, which comes with torch; and its launches.

Only for what Triton cannot express; `kernels.triton` is where kernels are written. The interfaces
are those of NVRTC and of the driver (CUDA C++ and Driver API references, 13.0), called by ctypes.
"""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.native import cache_folder
from kernels.devices import call_driver

MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
COOPERATIVE, EARLY = 2, 6  # CU_LAUNCH_ATTRIBUTE_: all programs at once; programmatic dependent
BF16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
WHOLE_LINES = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


class CompilerMissingError(RuntimeError):
    """NVRTC is not there."""


class _Attribute(ctypes.Structure):
    _fields_ = (("name", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class TensorMap(ctypes.Structure):
    """`CUtensorMap`."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class CudaKernel:
    """A kernel of one source, for the current device.

    Args:
        source: A file of CUDA C++ that includes none but those beside it.
        name: Of the kernel, `extern "C"`.
        values: Macros of integers that the source is compiled with.
        shared: Bytes of shared memory of a program.

    Raises:
        CompilerMissingError: it cannot be compiled here.
        RuntimeError: the source is wrong, or the driver refuses it.
    """

    def __init__(self, source: Path, name: str, values: Mapping[str, int], shared: int) -> None:
        image, module = compiled(source, values), ctypes.c_void_p()
        self._shared, self._function = shared, ctypes.c_void_p()
        call_driver("cuModuleLoadData", ctypes.byref(module), image)
        call_driver("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        call_driver("cuFuncSetAttribute", self._function, MAX_DYNAMIC_SHARED_SIZE, shared)

    def launch(self, programs: int, threads: int, arguments: ctypes.Structure) -> None:
        """Launch all programs at once on the current stream, before the kernel ahead has ended.

        Args:
            programs: How many; no more than fit on the device together.
            threads: Of each.
            arguments: What the kernel takes, as one structure.
        """
        attributes = (_Attribute * 2)()
        for own, which in zip(attributes, (COOPERATIVE, EARLY), strict=True):
            own.name, own.value[0] = which, 1
        stream = torch.cuda.current_stream().cuda_stream
        launch = _Launch((programs, 1, 1), (threads, 1, 1), self._shared, stream, attributes, 2)
        values = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        call_driver("cuLaunchKernelEx", ctypes.byref(launch), self._function, values, None)


def compiled(
    source: Path, values: Mapping[str, int], capability: tuple[int, int] | None = None
) -> bytes:
    """The machine code of a source, for the current device or one of some capability.

    It is kept beside the compiled kernels of the CPU (`kernels.cpu.native.cache_folder`), under the
    hash of all that it follows from.

    Raises:
        CompilerMissingError: NVRTC is not there.
        RuntimeError: the source is wrong, or NVRTC does not know the device.
    """
    nvrtc, numbers = _nvrtc(), (ctypes.c_int * 2)()
    nvrtc.nvrtcVersion(ctypes.byref(numbers), ctypes.byref(numbers, ctypes.sizeof(ctypes.c_int)))
    major, minor = capability or torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}a", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in values.items()]
    seen = hashlib.sha256(repr((*numbers, options, source.name)).encode())
    for path in sorted(source.parent.glob("*.cu*")):
        seen.update(path.name.encode() + path.read_bytes())
    name = f"{source.stem}-{seen.hexdigest()[:16]}.cubin"
    with suppress(OSError):
        return (cache_folder() / name).read_bytes()
    image = _compiled(nvrtc, source, [*options, f"-I{source.parent}"])
    with suppress(OSError):  # then it is compiled again
        _keep(cache_folder() / name, image)
    return image


def _compiled(nvrtc: ctypes.CDLL, source: Path, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    given = (ctypes.c_char_p * len(options))(*(text.encode() for text in options))
    text = source.read_bytes()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None)
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            log = _read(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            raise RuntimeError(f"{source.name} does not compile:\n{log}")
        return _read(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _keep(place: Path, image: bytes) -> None:
    """Write a file that appears at once."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
        made = Path(temporary) / place.name
        made.write_bytes(image)
        made.replace(place)


def tensor_map(weight: Tensor, outputs: int) -> TensorMap:
    """How TMA reads a contiguous bf16 weight [N, K]: as [K / 32, N, 32], of which it brings boxes
    [4, outputs, 32] (Driver API reference, `cuTensorMapEncodeTiled`).

    Raises:
        RuntimeError: the driver refuses it.
    """
    n, k = weight.shape
    sizes, strides = (ctypes.c_uint64 * 3)(32, n, k // 32), (ctypes.c_uint64 * 2)(2 * k, 64)
    box, steps = (ctypes.c_uint32 * 3)(32, outputs, 4), (ctypes.c_uint32 * 3)(1, 1, 1)
    room = ctypes.create_string_buffer(192)
    made = TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)
    place = ctypes.c_void_p(weight.data_ptr())
    how = 0, 0, WHOLE_LINES, 0  # no interleave, no swizzle; what is outside is zeros
    which = ctypes.byref(made)
    call_driver("cuTensorMapEncodeTiled", which, BF16, 3, place, sizes, strides, box, steps, *how)
    return made


def _read(nvrtc: Any, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, data)
    return data.raw


@cache
def _nvrtc() -> ctypes.CDLL:
    """The library that torch was built with: loaded already, on the path, or beside torch."""
    name = f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}"
    with suppress(OSError):
        return ctypes.CDLL(name)
    for place in sorted(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}")):
        return load_nvrtc(place)
    raise CompilerMissingError(f"{name} is not installed")


def load_nvrtc(place: Path) -> ctypes.CDLL:
    """NVRTC at a place, with what it loads by name from beside it."""
    for part in place.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(part), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(place))
