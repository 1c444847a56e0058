"""Runs the CUDA C++ of `kernels.cuda` without a device: compiled as C++, all threads in turns."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.cpu.build import compiler
from kernels.cuda import block_weights, fused_block
from kernels.cuda.nvrtc import TensorMap

ROUNDS = 100_000  # a block takes about two thousand
OPTIONS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off"]
SHARED = 232_448  # bytes that a program may have on sm_90
SOURCES = Path(__file__).with_name("emulated")


class EmulatedKernel:
    """As `kernels.cuda.nvrtc.CudaKernel`; each launch draws another order of its threads.

    Args:
        folder: Where it is compiled.
        source: As there, with its macros' `values`.
    """

    def __init__(self, folder: Path, source: Path, values: Mapping[str, int]) -> None:
        macros = [f"-D{name}={value}" for name, value in values.items()]
        work = folder / hashlib.sha256(" ".join(macros).encode()).hexdigest()
        library = work / "kernel.so"
        if not library.exists():
            shutil.copytree(
                source.parent, work, ignore=shutil.ignore_patterns("*.py", "__pycache__")
            )
            shutil.copytree(SOURCES, work, dirs_exist_ok=True)
            (work / "primitives.cuh").write_text("")
            command = [compiler(), *OPTIONS, *macros, str(work / "launch.cpp"), "-o", str(library)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert not done.returncode, done.stderr[:4000]
        self._library, self._seeds = ctypes.CDLL(str(library)), itertools.count(1)

    def launch(self, programs: int, threads: int, arguments: ctypes.Structure) -> None:
        del programs, threads
        seed = ctypes.c_uint64(next(self._seeds) * 0x9E3779B97F4A7C15 % 2**64)
        ended = self._library.launch(ctypes.byref(arguments), seed, ctypes.c_long(ROUNDS))
        assert ended, f"threads wait for each other: not ended after {ROUNDS} rounds"


@pytest.fixture(params=[8])
def processors(request, monkeypatch, tmp_path_factory) -> int:
    """Kernels run here, on a device of 8 processors or as many as a test says."""
    if platform.machine() != "x86_64":
        pytest.skip("fp16 and stacks of threads are those of x86-64")
    folder = tmp_path_factory.getbasetemp() / "emulated"
    folder.mkdir(exist_ok=True)
    device = SimpleNamespace(
        multi_processor_count=request.param, shared_memory_per_block_optin=SHARED
    )

    def kernel(source: Path, name: str, values: Mapping[str, int], shared: int) -> EmulatedKernel:
        assert (name, values["SHARED"]) == ("fused_block", shared)
        return EmulatedKernel(folder, source, values)

    def tensor_map(weight: Tensor, outputs: int) -> TensorMap:
        assert outputs == block_weights.GROUP
        return TensorMap((weight.data_ptr(), weight.shape[1]))

    monkeypatch.setattr(fused_block, "CudaKernel", kernel)
    monkeypatch.setattr(block_weights, "tensor_map", tensor_map)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    return request.param
