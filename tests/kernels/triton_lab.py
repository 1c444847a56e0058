"""Where tests of Triton kernels run without a GPU: the interpreter, and the compiler alone.

Triton decides at import whether kernels are interpreted, so each way has a process of its own: a
test decorated with `interpreted` or `compiled` runs its body there, one that compiles in CI alone.
"""

import contextlib
import functools
import importlib
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from formats.command import end_with
from tests.kernels.fast_interpreter import hasten

pytest.importorskip("triton", reason="Triton is not installed (it is in the `test` extra)")

SHARED = 232448  # bytes that a program has on sm_90


@functools.cache
def _process(interpret: bool) -> ProcessPoolExecutor:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = str(int(interpret))
    spawn = multiprocessing.get_context("spawn")  # workers of xdist end without ending their pools
    pool = ProcessPoolExecutor(1, spawn, initializer=end_with, initargs=(os.getpid(),))
    pool.submit(int).result()  # the process starts now, with the variable as it stands
    os.environ.pop("TRITON_INTERPRET")
    if before is not None:
        os.environ["TRITON_INTERPRET"] = before
    return pool


def _call(module: str, name: str, args: tuple, kwargs: dict) -> None:
    import ptq  # noqa: F401  (joins our kernels folder to a foreign package of that name)

    if os.environ["TRITON_INTERPRET"] == "1":
        hasten()
    torch.manual_seed(0)  # as in tests/kernels/conftest.py
    try:
        getattr(importlib.import_module(module), name).inner(*args, **kwargs)
    except pytest.fail.Exception as failure:  # which cannot be sent to another process
        raise AssertionError(str(failure)) from failure


def _elsewhere(interpret: bool, test: Callable) -> Callable:
    @functools.wraps(test)
    def outer(*args, **kwargs):
        process = _process(interpret)
        process.submit(_call, test.__module__, test.__name__, args, kwargs).result()

    outer.inner = test
    kind = "interpreted" if interpret else "compiled"
    group = f"{kind} engines" if "gpu" in test.__module__ else kind  # a process each, side by side
    marked = pytest.mark.xdist_group(group)(outer)
    return marked if interpret else pytest.mark.ci(marked)  # seconds a kernel


interpreted = functools.partial(_elsewhere, True)
compiled = functools.partial(_elsewhere, False)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative distance of two tensors."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@dataclass(frozen=True)
class Binary:
    """What a kernel became.

    Attributes:
        ptx: Its PTX.
        registers: Of a thread.
        stack: Bytes of local memory of a thread: what did not fit in registers.
        shared: Bytes of shared memory of a program.
    """

    ptx: str
    registers: int
    stack: int
    shared: int

    def count(self, pattern: str) -> int:
        """How many lines of the PTX match a regular expression."""
        return len(re.findall(pattern, self.ptx))

    def spills(self, predicates: int = 0) -> bool:
        """Whether registers did not do, but for so many bytes of predicates.

        Tiles were chosen under Triton 3.6; newer ones may leave the fullest some registers short.
        """
        import triton

        return self.stack > predicates + (0 if triton.__version__.startswith("3.6.") else 96)


class _Driver:
    """Stands in for a GPU that is only compiled for."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> str:
        return "cpu"


@contextlib.contextmanager
def building_for(capability: int) -> Iterator[list[Binary]]:
    """Launches inside compile for a capability (80, 89, 90) and do not run; gives the binaries."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    built: list[Binary] = []
    launch = JITFunction.run

    def build(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        self.device_caches.clear()
        built.append(_binary(launch(self, *args, grid=grid, warmup=True, **kwargs)))

    driver.set_active(_Driver(capability))
    JITFunction.run = build
    try:
        yield built
    finally:
        JITFunction.run = launch


def fitting(
    built: list[Binary], count: int = 1, shared: int = SHARED, registers: int = 255
) -> list[Binary]:
    """So many binaries, which keep to a program's registers and shared memory."""
    assert len(built) == count
    for binary in built:
        assert binary.stack == 0
        assert binary.shared <= shared, binary.shared
        assert binary.registers <= registers, binary.registers
    return built


def _binary(kernel: Any) -> Binary:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage).group(1)) for key in ("REG", "STACK"))
    return Binary(kernel.asm["ptx"], registers, stack, kernel.metadata.shared)


def assembler_says(ptx: str) -> str:
    """What ptxas has to say of PTX for sm_90a."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arguments = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        return subprocess.run(arguments, capture_output=True, text=True, check=True).stderr
