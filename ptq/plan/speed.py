"""Operations by kind, and how many of each a machine does in a second.

    products      fp32 multiplications and additions of matrix products
    products64    the same in fp64: factorizations of Hessians, and errors weighted by them
    elements      fp32 elements that an elementwise operation passes over; fp64 counts twice
    counted       elements that are put into histograms
    calls         operations that are started, whatever their size: what small models wait for
    nbytes        bytes that are written and hashed

Speeds are told by a few small operations on the device that will be used.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from formats.scheme import Strict


class Work(Strict):
    """Operations of a step, by kind; see the module's docstring."""

    products: float = 0.0
    products64: float = 0.0
    elements: float = 0.0
    counted: float = 0.0
    calls: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        pairs = {key: value + getattr(other, key) for key, value in self}
        return Work(**pairs)

    def __mul__(self, times: float) -> Work:
        return Work(**{key: value * times for key, value in self})

    def seconds(self, speed: Work) -> float:
        """Time at a speed: operations of each kind in a second."""
        return sum(value / getattr(speed, key) for key, value in self if value)


def total(works: Sequence[Work]) -> Work:
    """Their sum."""
    return sum(works, Work())


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """On a GPU, let products of fp32 matrices run in TF32: far faster, and finer than bf16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def measure_speed(device: torch.device) -> Work:
    """Operations of each kind that a device does in a second; takes about a tenth of one."""
    gpu = device.type == "cuda"
    side, count = (4096, 1 << 26) if gpu else (512, 1 << 20)
    a = torch.ones(side, side, device=device)
    half = torch.ones(side // 2, side // 2, device=device, dtype=torch.float64)
    x, one = torch.rand(count, device=device), torch.ones(1, device=device)
    bins = x.view(torch.int32) >> 16
    data = bytes(1 << 22)

    def rate(amount: float, work: Callable[[], object]) -> float:
        return amount / min(_seconds(work, device) for _ in range(4))  # the first one warms up

    with fast_products(device):
        products = rate(2 * side**3, lambda: a @ a)
    return Work(
        products=products,
        products64=rate(side**3 / 4, lambda: half @ half),
        elements=rate(count, lambda: x * 1.5),
        counted=rate(count, lambda: torch.bincount(bins, minlength=1 << 15)),
        calls=rate(200, lambda: [one.add(1) for _ in range(200)]),
        nbytes=rate(len(data), lambda: hashlib.sha256(data).digest()),
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
