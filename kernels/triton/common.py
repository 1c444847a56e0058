"""What the Triton kernels share: the workspace of split sums, rounding, and exact unpacking.

Kernels are plain Triton unless a file says otherwise. Inline assembly is guarded by `ASM`: Triton's
interpreter, in which every kernel is tested on a CPU, has none, and takes the plain operations
beside it, which compute the same function.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.tuning import PARTS, shared_memory

_alone = ContextVar("alone", default=False)
ASM = tl.constexpr(not triton.knobs.runtime.interpret)
WIDE_STEPS = 163840  # bytes of shared memory
EARLY_ROWS = 16  # of more, what follows a short kernel would find the device unevenly filled
AHEAD = tl.constexpr(2)  # steps whose weights a program asks for before its input is there
LEAST_FP16, MOST_FP16 = tl.constexpr(2.0**-14), tl.constexpr(65504.0)  # as in kernels.packed_cache
TINY_SCALE = tl.constexpr(2.0**-60)  # as in kernels.numerics
ROUND = tl.constexpr(1.5 * 2.0**23)  # x + ROUND - ROUND is x rounded half to even, |x| < 2^22

# Two words of two fp16 from four int8: byte b becomes the fp16 1024 + (b + 128), less 1152.
INT8_TO_FP16 = tl.constexpr("""{ .reg .b32 u, c;
xor.b32 u, $2, 0x80808080;
mov.b32 c, 0x64806480;
prmt.b32 $0, u, 0x64646464, 0x4140;
prmt.b32 $1, u, 0x64646464, 0x4342;
sub.rn.f16x2 $0, $0, c;
sub.rn.f16x2 $1, $1, c; }""")


# Of one thread: bytes of memory on their way to L2.
PREFETCH = tl.constexpr("""{ .reg .pred first; .reg .b32 t;
mov.u32 t, %tid.x;
setp.eq.u32 first, t, 0;
@first cp.async.bulk.prefetch.L2.global [$1], $2;
mov.b32 $0, 0; }""")
PREFETCH_LINE = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@dataclass(frozen=True)
class Workspace:
    """Memory in which the programs of a split sum leave their parts; one for each stream.

    The parts of a tile are added in order by the last of its programs to arrive, so that a sum does
    not depend on the order of arrival. That program sets the tile's count of arrivals back to zero.

    Attributes:
        parts: fp32, the partial sums.
        arrivals: int32, zero between launches.
    """

    parts: Tensor
    arrivals: Tensor

    @classmethod
    def on(cls, device: torch.device | str, elements: int = PARTS, tiles: int = 1 << 16):
        """A workspace of `elements` partial sums (4 bytes each) for at most `tiles` tiles."""
        return cls(
            torch.empty(elements, dtype=torch.float32, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
        )

    def check(self, elements: int, tiles: int) -> None:
        """Raise ValueError where a launch needs more than there is."""
        if elements > self.parts.numel() or tiles > self.arrivals.numel():
            raise ValueError(
                f"split sum needs {elements} partial sums of {tiles} tiles; the workspace holds "
                f"{self.parts.numel()} of {self.arrivals.numel()}: make a larger one"
            )


def require(holds: bool, message: str) -> None:
    """Raise ValueError with `message` unless `holds`."""
    if not holds:
        raise ValueError(message)


def capability() -> int:
    """Of the current device, 80 for 8.0; the interpreter stands for 90."""
    if triton.knobs.runtime.interpret:
        return 90
    driver = triton.runtime.driver.active
    return _capability(driver, driver.get_current_device())


def overlap(early: bool = True) -> dict[str, Any]:
    """Arguments by name of a launch that may start before the kernel ahead of it has ended.

    Programmatic dependent launch, from Hopper on. Every program of such a kernel calls `wait`
    before it writes, and before it reads what the kernel ahead writes: what kernels before that
    wrote is there, since `announce`, upon which the programs of the next kernel start where there
    is room, comes after `wait`. (Before it, the next kernel but one would find the places that the
    next leaves, and lie unevenly.)

    Args:
        early: Whether the next kernel starts at `announce`, not at the end of all programs.
    """
    if _alone.get() or triton.knobs.runtime.interpret or capability() < 90:
        return {"OVERLAP": 0}
    return {"OVERLAP": 2 if early else 1, "launch_pdl": True}


@contextmanager
def alone() -> Iterator[None]:
    """Launches inside start after the kernel ahead has ended: for measuring one, or for a check."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


@cache
def _capability(driver: Any, device: int) -> int:
    return driver.get_current_target().arch


def takes_wide_steps(device: torch.device) -> bool:
    """Whether tiles of 256 inputs fit: from Hopper on, but where shared memory is as small as
    Ada's."""
    return capability() >= 90 and shared_memory(device) >= WIDE_STEPS


def has_e4m3(device: torch.device) -> bool:
    """Whether a device has e4m3 as a type, from Ada on; the interpreter has it."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def is_sm_90(device: torch.device) -> bool:
    """Whether a device is a Hopper GPU, for which there are kernels of many rows."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def library_scales(device: torch.device) -> bool:
    """Whether cuBLASLt takes fp8 with scales of rows and of blocks: on sm_90, from CUDA 12.9 on."""
    version = [int(part) for part in (torch.version.cuda or "0").split(".")]
    return version >= [12, 9] and is_sm_90(device)


def storage(t: Tensor) -> Tensor:
    """`t` as a kernel takes it: before Ada e4m3 is no type, and its bits go as int8."""
    if t.dtype == torch.float8_e4m3fn and capability() < 89:
        return t.view(torch.int8)
    return t


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Wait until all that the kernels ahead wrote can be read; see `overlap`."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def announce(OVERLAP: tl.constexpr):
    """Let the programs of the next kernel start where there is room; see `overlap`."""
    if OVERLAP == 2:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_and_announce(OVERLAP: tl.constexpr):
    """`wait`, then `announce`: in this order, as `overlap` says."""
    wait(OVERLAP)
    announce(OVERLAP)


@triton.jit
def prefetch(start, BYTES: tl.constexpr):
    """Ask for so many bytes from a pointer on, multiples of 16, to be brought into L2."""
    tl.inline_asm_elementwise(
        PREFETCH, "=r,l,r", [start, BYTES], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_lines(places):
    """Ask for the lines of 128 bytes at pointers to be brought into L2."""
    tl.inline_asm_elementwise(
        PREFETCH_LINE, "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def round_half_even(x):
    """x rounded to an integer, half to even; exact for |x| < 2^22."""
    return (x + ROUND) - ROUND


@triton.jit
def divide(x, scale):
    """x / scale as fp32 division rounds it, for normal results; a scale serves many x.

    Markstein 1990: with the rounded reciprocal r, x r + (x - scale (x r)) r is the rounded ratio,
    if both sums are fused. The interpreter does not fuse, and divides.
    """
    if ASM:
        reciprocal = tl.div_rn(1.0 + tl.zeros_like(scale), scale) + tl.zeros_like(x)
        near = x * reciprocal
        rest = tl.fma(-near, scale + tl.zeros_like(x), x)
        return tl.fma(rest, reciprocal, near)
    return tl.div_rn(x, scale + tl.zeros_like(x))


@triton.jit
def quantize(x, scale, dtype: tl.constexpr, BITS: tl.constexpr = False):
    """x / scale, a true division, clamped to [-127, 127] or [-448, 448], rounded half to even.

    With BITS e4m3 comes as int8 that holds its bits. uint8 stands for int4, in [-8, 7], plus 8.
    """
    ratio = divide(x, scale)
    if dtype == tl.int8:
        q = round_half_even(tl.minimum(tl.maximum(ratio, -127.0), 127.0)).to(tl.int8)
    elif dtype == tl.uint8:
        q = (round_half_even(tl.minimum(tl.maximum(ratio, -8.0), 7.0)) + 8.0).to(tl.uint8)
    else:
        near = tl.minimum(tl.maximum(ratio, -448.0), 448.0)
        if BITS:
            q = e4m3_bits(near)
        elif ASM:
            q = near.to(dtype)
        else:  # the interpreter's cast errs at carries
            q = e4m3_bits(near).to(dtype, bitcast=True)
    return q


@triton.jit
def e4m3_bits(x):
    """The bits of |x| <= 448 rounded to e4m3, in int8: the fp16 of x / 256 holds them in a row."""
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 127 - 6)
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)  # between neighbours in e4m3
    inverse = ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    half = (round_half_even(x * inverse) * (step * 0.00390625)).to(tl.float16)
    bits = half.to(tl.int16, bitcast=True)
    return (((bits >> 8) & 0x80) | ((bits >> 7) & 0x7F)).to(tl.int8)


@triton.jit
def absmax_scale(absmax, dtype: tl.constexpr):
    """absmax / 127 (int8) or / 448 (e4m3), a tiny one for zero."""
    top = 127.0 if dtype == tl.int8 else 448.0
    return tl.maximum(tl.div_rn(absmax, top + tl.zeros_like(absmax)), TINY_SCALE)


@triton.jit
def token_scale(low, high, dtype: tl.constexpr):
    """Scale of what is between two bounds: of int4 (uint8) as `kernels.packed_cache` takes it."""
    absmax = tl.maximum(high, -low)
    if dtype == tl.uint8:
        size = tl.minimum(tl.maximum(absmax * 0.125, LEAST_FP16), MOST_FP16)
        return tl.where(high > -low, -size, size)
    return absmax_scale(absmax, dtype)


@triton.jit
def eight_bits_to_fp16(x):
    """int8 or e4m3 to fp16, exact."""
    if ASM and x.dtype == tl.int8:
        return tl.inline_asm_elementwise(
            INT8_TO_FP16, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4
        )
    return x.to(tl.float16)


@triton.jit
def sum_splits(acc, parts, arrivals, tile, split, offsets, mask, SPLITS: tl.constexpr):
    """Leave a tile's part; the last program of the tile to arrive gets the sum of all parts.

    Args:
        acc: This program's part.
        parts: Pointer to all parts, in the type of `acc`.
        arrivals: Pointer to the count of arrivals of each tile.
        tile: Number of the tile.
        split: Number of this part.
        offsets: Of the elements of `acc` in a part, from 0 to its size.
        mask: Elements that exist.
        SPLITS: Parts of a tile.

    Returns:
        (acc, whether the caller is last); the sum only if it is.
    """
    size: tl.constexpr = acc.numel
    place = parts + tile.to(tl.int64) * (SPLITS * size) + offsets
    tl.store(place + split * size, acc, mask=mask)
    tl.debug_barrier()
    last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.debug_barrier()
        acc = tl.zeros_like(acc)
        for i in tl.static_range(SPLITS):
            acc += tl.load(place + i * size, mask=mask, other=0, cache_modifier=".cg")
        tl.store(arrivals + tile, 0)
    return acc, last
