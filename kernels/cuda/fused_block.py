"""From one attention to the next, or with it, in one kernel, for up to four tokens on Hopper.

    total = x W_o + residual                          h = silu(n W_gate) * n W_up,  n = norm(total)
    total = total + h W_down                          qkv = norm'(total) W_qkv of the next block

Of a mixture of experts h W_down is the weighted sum of the chosen experts', of one token. Seven
kernels otherwise, eleven of a mixture. What these lose with few tokens is memory that stands idle:
between two products, each of which asks for its first weights when the one before has ended. Here a
program on each SM walks through the four products, and asks for weights in one order, into rings in
shared memory that are filled without regard to where the product is: each warp has a ring of its
own, and its lanes copy into it. (Bulk copies are no faster, but of weights in bf16.)

- A program owns whole outputs of each product, its warps blocks of 128 inputs. The sums of the
  warps are added in their order; a result does not depend on time.
- Programs hand on rows by values in memory that are blank until they are written, and the reader
  reads until none is: a barrier would take a round trip more, and there is no counter. All
  programs must run at once, as a cooperative launch ensures.
- bf16 inputs of 4-bit weights become integers of 16 bits with a unit for each 128 of them (what the
  CPU's kernels do): two bytes are two columns of a product of 8-bit integers, whose sums are exact.
  So eight packed weights take three instructions, and results differ from those of the single
  kernels by less than bf16 inputs are rounded by.
- Weights in bf16 multiply bf16 inputs as they are; TMA brings them in boxes of 16 outputs.
- 8-bit weights of 8-bit inputs have the exact sums and the roundings of the single kernels. What
  has a static scale is handed on as integers; else, and after norms, each program quantizes
  what it reads.
- All programs compute some of a router's outputs and hand these on, too; then each chooses the
  experts for itself.

Weights are those that `kernels.triton.linear` packs, `weight_only` and `w8a8`, or in bf16; nothing
is held twice.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpu.structures import pointer
from kernels.cuda.attention import Attention, CacheArguments
from kernels.cuda.block_weights import BlockShape, BlockWeights
from kernels.cuda.nvrtc import CudaKernel, TensorMap
from kernels.triton.common import require

SOURCE = Path(__file__).with_name("fused_block.cu")
MOST_ROWS = 4  # that it runs; `BlockShape.most_rows` are those that gain
DEEPEST = 3  # slots of a ring: with more, what programs hand on waits for weights


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p * 4),
        ("scale", ctypes.c_void_p * 4),
        ("bias", ctypes.c_void_p * 4),
        ("static_scale", ctypes.c_void_p * 4),
        ("sinks", ctypes.c_void_p * 4),
        ("x", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("norm", ctypes.c_void_p * 2),
        ("total", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("exchanged", ctypes.c_void_p),
        ("launches", ctypes.c_void_p),
        ("router", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("factor", ctypes.c_float),
        ("normalized", ctypes.c_int),
        ("x_scaled", ctypes.c_int),
        ("cache", CacheArguments),
        ("_", ctypes.c_void_p),  # so that the next is aligned to 64 bytes, as the source says
        ("map", TensorMap * 4),
    )


class FusedBlocks:
    """The kernel for blocks of one shape and so many tokens, and what its launches share.

    Launches of one object must follow each other on one stream.

    Args:
        rows: Tokens, 1 to 4; of a mixture 1.
        device: An sm_90.

    Raises:
        ValueError: a program of this shape does not fit on an SM.
        CompilerMissingError: see `CudaKernel`.
    """

    def __init__(self, shape: BlockShape, rows: int, device: torch.device) -> None:
        require(1 <= rows <= MOST_ROWS, f"{rows} tokens; needed are 1 to {MOST_ROWS}")
        properties = torch.cuda.get_device_properties(device)
        room = properties.shared_memory_per_block_optin
        programs = shape.programs(properties.multi_processor_count)
        require(not shape.experts or rows == 1, f"{rows} tokens of a mixture; needed is 1")
        require(shape.fits(programs), f"{programs} programs would own outputs of two experts")
        fitting = [d for d in range(2, DEEPEST + 1) if shape.shared(rows, programs, d) <= room]
        require(
            bool(fitting),
            f"{shape} takes {shape.shared(rows, programs, 2)} bytes of shared memory with "
            f"{rows} tokens; there are {room}",
        )
        depth, self._programs = fitting[-1], programs
        self._shape, self._rows, self._threads = shape, rows, 32 * shape.warps
        values = shape.values(rows, programs, depth)
        self._kernel = CudaKernel(SOURCE, "fused_block", values, values["SHARED"])
        of_inner = 2 if shape.bits != 8 else 1 if shape.static else 4  # bytes
        handed_on = rows * (4 * shape.hidden + of_inner * shape.inputs[2]) + 4 * shape.experts
        if shape.heads is not None:
            splits = shape.heads.splits(rows, programs)
            require(splits > 0, f"{programs} programs for {shape.heads.kv_heads} heads of {rows}")
            handed_on += shape.heads.handed_on(rows, programs, of_inner)
        self._exchanged = torch.full((2, handed_on), -1, dtype=torch.int8, device=device)
        self._launches = torch.zeros(1, dtype=torch.int32, device=device)

    def run(
        self,
        weights: BlockWeights,
        x: Tensor | Attention,
        x_scale: Tensor | None,
        residual: Tensor,
        eps: float,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run what stands between two attentions, with the first of them if the shape has one.

        Args:
            weights: Of this shape, but for its attention.
            x: The attention; or what it gives, as o wants it: bf16 or int8 [rows, attention],
                contiguous.
            x_scale: Of int8 rows, fp32 of one element or of one a row.
            residual: The residual stream, bf16 [rows, hidden], contiguous.
            eps: Added to mean squares by the norms.
            sinks: int32 [rows], 1 for sink tokens, where these have input scales of their own.

        Returns:
            (the residual stream after the block, bf16 [rows, hidden]; q, k and v of the next
            block, bf16 [rows, qkv], or None).

        Raises:
            ValueError: a shape or type is another.
        """
        shape, rows = self._shape, self._rows
        needed = replace(shape, heads=None)
        require(weights.shape == needed, f"weights are of {weights.shape}; needed is {needed}")
        _check("the residual", residual, torch.bfloat16, (rows, shape.hidden))
        of_x = 0 if x_scale is None else x_scale.numel()
        given, cache = self._checked(x, of_x)
        total = torch.empty_like(residual)
        qkv = residual.new_empty(rows, shape.qkv) if shape.qkv else None
        place, router = pointer, weights.router
        scales = [own.scales_of(sinks) for own in weights.inputs]  # and which is each row's
        arguments = _Arguments(
            *weights.places,
            tuple(place(known) for known, _ in scales),
            tuple(place(which) for _, which in scales),
            *map(place, (given, x_scale, residual)),
            tuple(map(place, weights.norms)),
            *map(place, (total, qkv, self._exchanged, self._launches)),
            None if router is None else place(router.weight),
            eps,
            1.0 if router is None else router.factor,
            router is not None and router.normalized,
            of_x > 1,
            cache,
            None,
            weights.maps,
        )
        self._kernel.launch(self._programs, self._threads, arguments)
        return total, qkv

    def _checked(self, x: Tensor | Attention, scales: int) -> tuple[Tensor | None, CacheArguments]:
        """(rows of o, what attention reads) of which a launch has one; `scales` are those of rows.

        Raises:
            ValueError: it is the other one, or a shape or type is another.
        """
        shape, rows = self._shape, self._rows
        if isinstance(x, Tensor):
            own_type = torch.int8 if shape.bits == 8 else torch.bfloat16
            _check("x", x, own_type, (rows, shape.attention))
            allowed = sorted({1, rows}) if shape.bits == 8 else [0]
            require(scales in allowed, f"x has {scales} scales; needed is one of {allowed}")
            require(shape.heads is None, f"x is {type(x).__name__}, for {shape}")
            return x, CacheArguments()
        if shape.heads is None:
            raise ValueError(f"x is {type(x).__name__}, for {shape}")
        return None, x.arguments(shape.heads)


def _check(what: str, found: Tensor, dtype: torch.dtype, size: tuple[int, int]) -> None:
    require(
        found.shape == size and found.dtype == dtype and found.is_contiguous(),
        f"{what} is {found.dtype} {tuple(found.shape)}; needed is contiguous {dtype} {size}",
    )
