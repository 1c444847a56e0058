"""The compiled kernels as Python sees them: the library, and linear layers with packed weights.

Everything here takes and gives torch tensors on the CPU; the ops of `kernels.ops` stand on it. The
library is found in the package (built when it was installed), in a cache, or is compiled at first
use. Where none of these works, `library()` is None, a warning says so once, and the ops run on
torch's own.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import POINTER, byref, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import build
from kernels.cpu.structures import (
    FORMATS,
    NO_SCALE,
    NO_SUCH_BLOCK,
    NO_ZERO,
    NONFINITE,
    SCALE_BF16,
    SCALE_F16,
    SCALE_F32,
    ZERO_F32,
    ZERO_I8,
    AttentionArgs,
    FeedbackTile,
    LinearArgs,
    Packed,
    PackSource,
    QuantizeArgs,
    WriteKvArgs,
    pointer,
)

log = logging.getLogger("ptq.kernels")

ISAS = ("portable", "avx2", "avx512_vnni")
ANOTHER_CACHE = "PTQ_CACHE may name a folder that this user can write to"
MAPPED = 1 << 20  # bytes from which on memory of its own is mapped

_SIGNATURES = {
    "ptq_supports": ([c_int], c_int),
    "ptq_isa": ([], c_int),
    "ptq_force": ([c_int], None),
    "ptq_pack_bytes": ([POINTER(PackSource)], c_int64),
    "ptq_pack": ([POINTER(PackSource), c_void_p, c_int], None),
    "ptq_linear": ([POINTER(LinearArgs), c_int], c_int),
    "ptq_rows": ([c_void_p] * 3 + [c_int64, c_int], None),
    "ptq_quantize": ([POINTER(QuantizeArgs), c_int], None),
    "ptq_rms_norm": (
        [c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64, c_int64, c_int],
        None,
    ),
    "ptq_gated_product": ([c_void_p] * 3 + [c_int64] * 3 + [c_int] * 2, None),
    "ptq_lora": ([c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 3, c_int], None),
    "ptq_softcap": ([c_void_p, c_float, c_void_p, c_int64, c_int], None),
    "ptq_turn": ([c_void_p] * 2 + [c_int64] * 5 + [c_int], None),
    "ptq_rope": ([c_void_p] * 4 + [c_int64] * 4 + [c_int], None),
    "ptq_read": ([c_void_p, c_int64, c_int], c_int64),
    "ptq_multiply_add": ([c_int, c_int64, c_int], c_double),
    "ptq_decoder_workspace": ([c_void_p, c_int64], c_int64),
    "ptq_decoder_step": ([c_void_p, c_void_p, c_int], c_int),
    "ptq_write_kv": ([POINTER(WriteKvArgs), c_int], None),
    "ptq_feedback": ([POINTER(FeedbackTile)], None),
    "ptq_compare": ([c_void_p] * 4 + [c_int64] * 2 + [c_int], None),
    "ptq_attention": ([POINTER(AttentionArgs), c_int], c_int),
}


def packaged_folder() -> Path:
    """Where the library is that was compiled when the package was installed."""
    return Path(__file__).resolve().parent / "_native"


def cache_folder() -> Path:
    """Where libraries that are compiled at first use are kept: `PTQ_CACHE`, or a user's own cache.

    Raises:
        OSError: the user has no home folder, as in a container.
    """
    if own := os.environ.get("PTQ_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptq"
    except RuntimeError as error:
        raise OSError("this user has no home folder") from error


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had; the reason is logged once."""
    path = packaged_folder() / build.library_name()
    try:
        if not path.is_file() and not (path := cache_folder() / path.name).is_file():
            build.compiler()
            log.warning("compiling the CPU kernels into %s, once: about a minute", path.parent)
            path = build.build(path.parent)
        return open_library(path)
    except (build.CompilerError, OSError) as error:
        way = "" if isinstance(error, build.CompilerError) else f". {ANOTHER_CACHE}"
        log.warning("no compiled CPU kernels, torch's ops are used (slower): %s%s", error, way)
        return None


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library and declare its functions."""
    loaded = ctypes.CDLL(str(path))  # torch is imported: both share its OpenMP
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    return loaded


def supported() -> list[str]:
    """Instruction sets that are compiled in and that this processor runs."""
    loaded = library()
    return [n for i, n in enumerate(ISAS) if loaded is not None and loaded.ptq_supports(i)]


def isa() -> str | None:
    """The instruction set in use, or None without compiled kernels."""
    loaded = library()
    return None if loaded is None else ISAS[loaded.ptq_isa()]


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Use another instruction set for a while; weights packed for one do not run on another."""
    loaded = library()
    if loaded is None or name not in supported():
        raise ValueError(f"instruction set {name!r} does not run here; {supported()} do")
    before = loaded.ptq_isa()
    loaded.ptq_force(ISAS.index(name))
    try:
        yield
    finally:
        loaded.ptq_force(before)


def loaded() -> ctypes.CDLL:
    """The compiled kernels, for callers that know that there are any."""
    found = library()
    assert found is not None, "callers ask library() first"
    return found


def call(name: str, *arguments: Any) -> Any:
    """Call one of the compiled kernels on torch's threads, whose number comes last.

    Args:
        name: Without its prefix, such as `rope`.
        arguments: Tensors go by the address of their data, structures, by `_SIGNATURES`, by theirs.
    """
    given = [own.data_ptr() if isinstance(own, Tensor) else own for own in arguments]
    return getattr(loaded(), f"ptq_{name}")(*given, torch.get_num_threads())


def pack(
    q: Tensor,
    fmt: str,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    group: int | None = None,
) -> Tensor:
    """Pack a weight for the instruction set in use.

    Args:
        q: [N, K]: fp32, bf16, fp16, e4m3 or int8 (int4 one a byte, in [-8, 7]).
        fmt: `FORMATS`.
        scale: fp32 [N, groups], or None.
        zero: int8 or, for inputs in fp32, fp32 [N, groups]; None for symmetric integers.
        bias: fp32 [N], or None.
        group: Inputs that share a scale; None for all.

    Returns:
        uint8, one dimension, aligned to 64 bytes: everything about the weight.
    """
    outputs, inputs = q.shape
    group = inputs if group is None else min(group, inputs)
    kind = NO_SCALE
    if scale is not None:
        if fmt == "int4" and zero is not None and zero.dtype == torch.int8:
            q, scale, zero = _with_signs(q, scale, zero, group)
        scale, kind = _narrowed(scale.float().contiguous())
    q = q.contiguous()
    zeros = NO_ZERO
    if zero is not None:
        zeros = ZERO_F32 if zero.is_floating_point() else ZERO_I8
        zero = zero.to(torch.float32 if zeros == ZERO_F32 else torch.int8).contiguous()
    bias = None if bias is None else bias.float().contiguous()
    source = PackSource(
        *map(pointer, (q, scale, zero, bias)), FORMATS[fmt], kind, zeros, outputs, inputs, group
    )
    out = aligned(loaded().ptq_pack_bytes(byref(source)))
    call("pack", source, out)
    return out


def _with_signs(
    q: Tensor, scale: Tensor, zero: Tensor, group: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same int4 without zero points that are 0 or -1: (q + 1) s is ~q times -s."""
    if not bool(((zero == 0) | (zero == -1)).all()):
        return q, scale, zero
    turned = (zero == -1).repeat_interleave(group, dim=1)[:, : q.shape[1]]
    return torch.where(turned, ~q, q), torch.where(zero == -1, -scale, scale), None


def _narrowed(scale: Tensor) -> tuple[Tensor, int]:
    """Scales, in half the bytes where that loses nothing, and of what type they are packed."""
    if torch.equal(scale.bfloat16().float(), scale):
        return scale, SCALE_BF16
    half = scale.half()
    return (half, SCALE_F16) if torch.equal(half.float(), scale) else (scale, SCALE_F32)


def _is_mapped(size: int) -> bool:
    """Whether so many bytes have memory of their own, which the system gives in zeros."""
    return size >= MAPPED and hasattr(mmap, "MADV_HUGEPAGE")


def aligned(size: int) -> Tensor:
    """uint8 [size] whose address is a multiple of 64.

    Large ones are mapped, in huge pages where the system allows it: they are read faster, and
    leave no holes between what is allocated and freed while a model is loaded.
    """
    if not _is_mapped(size):
        raw = torch.empty(size + 64, dtype=torch.uint8)
        return raw.narrow(0, -raw.data_ptr() % 64, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on a CPU; large ones take memory only where they are written, if the system allows."""
    size = math.prod(shape) * dtype.itemsize
    if not _is_mapped(size):
        return torch.zeros(shape, dtype=dtype, device=device)
    return aligned(size).view(dtype).view(shape)


def header(packed: Tensor) -> Packed:
    """What a packed weight says of itself."""
    return Packed.from_address(packed.data_ptr())


def linear(x: Tensor, packed: Tensor, x_scale: Tensor | None = None) -> Tensor:
    """x w^T + bias.

    Args:
        x: int8 [T, K] with scales, or fp32 [T, K].
        packed: From `pack`.
        x_scale: fp32, one element or [T, 1]; for int8 only.

    Returns:
        fp32 [T, N].
    """
    x = x.contiguous()
    y = torch.empty(x.shape[0], header(packed).outputs)
    per_row = x_scale is not None and x_scale.numel() > 1
    args = LinearArgs(
        packed.data_ptr(),
        x.data_ptr(),
        pointer(x_scale),
        x.dtype == torch.int8,
        per_row,
        0,
        x.shape[0],
        x.shape[1],
        y.shape[1],
        y.data_ptr(),
    )
    if call("linear", args):
        raise ValueError(f"the weight was packed for another instruction set than {isa()}")
    return y


def rows(packed: Tensor, ids: Tensor) -> Tensor:
    """Rows of a packed weight as floats: fp32 [R, K] of ids int64 [R]."""
    ids, out = ids.contiguous(), torch.empty(len(ids), header(packed).inputs)
    call("rows", packed, ids, out, len(ids))
    return out


def tokens(x: Tensor) -> Tensor:
    """[T, heads, D] as fp32 with the heads of a token adjacent; tokens may be apart."""
    wide = x.float()
    return wide if wide.stride()[1:] == (wide.shape[2], 1) else wide.contiguous()


def report(problem: c_int32) -> None:
    """Raise what a kernel found in the data.

    Raises:
        ValueError: it found something.
    """
    if problem.value & NONFINITE:
        raise ValueError("absmax must be finite and not negative; the data hold NaN or infinity")
    if problem.value & NO_SUCH_BLOCK:
        raise ValueError("a slot or a block table names a block that the cache does not have")
