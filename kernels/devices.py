"""Devices that the kernels run on."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import requires

import torch

OLDEST_GPU = (8, 0)
OLDEST_TRITON = (3, 6)


def check_device(device: torch.device | str) -> torch.device:
    """A device that models run on.

    Raises:
        ValueError: it is of another kind, torch sees no such GPU, Triton is missing or too old, or
            the GPU is older than Ampere.
    """
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"found {device!r}; allowed are cpu, cuda and cuda:N") from error
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"found {device!r}; allowed are cpu, cuda and cuda:N")
    if place.type == "cpu":
        return place
    if (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"found {device!r}, but torch sees {torch.cuda.device_count()} GPUs here; a GPU needs "
            "its driver and a torch with CUDA, only cpu runs without"
        )
    check_triton()
    found = torch.cuda.get_device_capability(place)
    if found < OLDEST_GPU:
        raise ValueError(
            f"{torch.cuda.get_device_name(place)} has compute capability "
            f"{found[0]}.{found[1]}; the kernels need {OLDEST_GPU[0]}.{OLDEST_GPU[1]} (Ampere) or "
            "later; use cpu"
        )
    return torch.device("cuda", place.index or 0)


def check_triton() -> None:
    """Raise ValueError where Triton is missing or too old; the message says what torch asks for."""
    oldest = ".".join(map(str, OLDEST_TRITON))
    try:
        import triton  # pyright: ignore[reportMissingImports]
    except ImportError:
        state = "which is not installed"
    else:
        if tuple(map(int, triton.__version__.split(".")[:2])) >= OLDEST_TRITON:
            return
        state = f"{oldest} or later; found is {triton.__version__}"
    pins = [line.split(";")[0].strip() for line in requires("torch") or ()]
    wanted = next((pin for pin in pins if pin.startswith("triton=")), f"triton>={oldest}")
    raise ValueError(
        f"a GPU needs Triton, {state}: pip install '{wanted}' (for torch {torch.__version__})"
    )


def launches_on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: Triton launches there, wherever a kernel's tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def cuda_driver() -> ctypes.CDLL:
    """The library of CUDA's driver."""
    return ctypes.CDLL("libcuda.so.1")


def call_driver(name: str, *arguments: object) -> None:
    """Call a function of CUDA's driver.

    Raises:
        RuntimeError: it fails; the message has its code and what that means.
    """
    code = cuda_driver()[name](*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda_driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name} gave {code}, {(text.value or b'').decode()}")


def run_on_gpu(measure: Callable[[torch.device], int]) -> int:
    """Run a command that measures the GPU, and return its exit code.

    Where nothing can run on one that is 2, and a line says why; an interrupt gives 130.
    """
    try:
        device = check_device("cuda")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        return measure(device)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
