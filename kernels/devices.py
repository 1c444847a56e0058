"""Devices that the kernels run on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch

OLDEST_GPU = (8, 0)


def check_device(device: torch.device | str) -> torch.device:
    """A device that models run on.

    Raises:
        ValueError: it is of another kind, torch sees no such GPU, Triton is missing, or the GPU is
            older than Ampere.
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
    if find_spec("triton") is None:
        raise ValueError(
            "a GPU needs Triton, which is not installed: pip install 'triton>=3.6,<3.7'"
        )
    found = torch.cuda.get_device_capability(place)
    if found < OLDEST_GPU:
        raise ValueError(
            f"{torch.cuda.get_device_name(place)} has compute capability "
            f"{found[0]}.{found[1]}; the kernels need {OLDEST_GPU[0]}.{OLDEST_GPU[1]} (Ampere) or "
            "later; use cpu"
        )
    return torch.device("cuda", place.index or 0)


def launches_on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: Triton launches there, wherever a kernel's tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
