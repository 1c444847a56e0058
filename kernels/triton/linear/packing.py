"""How quantized weights of linear layers on a GPU are laid out: checks, scales, biases.

Quantized weights come as integers q [N, K] with scales and zero points of groups of inputs,

    w[n, k] = s[n, g] (q[n, k] - z[n, g]),        g = k / group,

and are laid out in tiles of 64 outputs by 128 inputs. The scales lie [groups, N], a row for each
step of a sum. Groups of more than 128 inputs are cut into groups of 128. A zero point of b bits is
put, as z + 2^(b-1), into the last b bits of its scale in fp32: one load brings both, of 4 bytes,
which can be asynchronous. Scales of 16 bits lose nothing; those of fp32 keep 20 (b = 4) or 16 bits.

Whatever packs a weight takes several of one shape too, [E, N, K], with scales, zero points and
biases likewise, by the calls of one: what is in memory then has this dimension before its own.

Rows of a packed weight are read back as floats for the embedding of tokens, where the head is the
embedding, too:

    y[t, k] = s[n, g] (q[n, k] - z[n, g]),        n = ids[t]

The weight is stored as its product wants it, and the place of an element follows from that. A row
of tiles is read in pieces of some bytes: little beside a step, which reads the whole head.
"""

# pyright: reportArgumentType=false, reportMissingImports=false, reportOperatorIssue=false
from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import require

BLOCK = 128  # inputs of a tile
GROUPS = (32, 64, BLOCK)  # inputs that share a scale in a kernel


def check_grouped(q: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int) -> None:
    """Raise ValueError unless integers [N, K] of some bits, scales and zero points fit together."""
    require(
        fits_tiles(q) and q.dtype == torch.int8,
        f"weight is {q.dtype} {tuple(q.shape)}; needed is int8 [N, K], N in 64s and K in {BLOCK}s",
    )
    (*of_rows, inputs), groups = q.shape, scale.shape[-1]
    require(
        tuple(scale.shape) == (*of_rows, groups)
        and scale.is_floating_point()
        and groups > 0
        and inputs % groups == 0
        and (inputs // groups in GROUPS or inputs // groups % BLOCK == 0),
        f"scales are {scale.dtype} {tuple(scale.shape)}; needed are floats {of_rows} of groups, "
        f"one for each group of 32, 64 or a multiple of {BLOCK} of the {inputs} inputs",
    )
    require(
        zero_point is None or (zero_point.dtype == torch.int8 and zero_point.shape == scale.shape),
        "zero points are "
        + ("" if zero_point is None else f"{zero_point.dtype} {tuple(zero_point.shape)}")
        + f"; needed is int8 {tuple(scale.shape)}, one for each scale",
    )
    if bits == 8:
        return
    for what, values in (("weight", q), ("zero point", zero_point)):
        low, high = (0, 0) if values is None else torch.stack(values.aminmax()).tolist()
        require(low >= -8 and high < 8, f"{what} has values outside of [-8, 7]")


def fits_tiles(q: Tensor) -> bool:
    """Whether a weight [N, K] is cut by tiles without a rest."""
    return q.dim() >= 2 and q.shape[-2] % 64 == 0 and q.shape[-1] % BLOCK == 0


def lay_scales(
    scale: Tensor, zero_point: Tensor | None, inputs: int, bits: int, keep_whole: bool = False
) -> tuple[Tensor, int, bool]:
    """Scales [N, groups] and zero points as kernels read them; see the top of the file.

    Args:
        scale: Float [N, groups].
        zero_point: int8 [N, groups] or None.
        inputs: K.
        bits: Of a zero point.
        keep_whole: Whether one scale an output stays so, rather than be spread over groups of 128.

    Returns:
        (scales [groups, N], group size or 0, whether there are zero points): the last three fields
        of `GroupedWeight`, but for the bias.
    """
    group = inputs // scale.shape[-1]
    if keep_whole and scale.shape[-1] == 1:
        group = 0
    repeats = max(1, group // BLOCK)
    if zero_point is not None:
        words = scale.float().contiguous().view(torch.int32)
        words = ((words + (1 << (bits - 1))) >> bits) << bits  # rounded to the bits that stay
        scale = words | (zero_point.to(torch.int32) + (1 << (bits - 1)))
    laid = scale.detach().mT.repeat_interleave(repeats, -2).contiguous()
    return laid, min(group, BLOCK), zero_point is not None


def lay_bias(bias: Tensor | None, weight: Tensor) -> Tensor | None:
    """A bias in fp32; ValueError unless it has one value an output of a weight [N, K]."""
    if bias is None:
        return None
    found, needed = tuple(bias.shape), tuple(weight.shape[:-1])
    require(found == needed, f"bias is {found}; needed is {needed}")
    return bias.detach().float().contiguous()


Layout = Literal["tiles", "runs", "rows"]
WIDTH = 512  # elements of a row that a program gathers


@triton.jit
def byte_of_tile(n, k, BITS: tl.constexpr):
    """Where in its tile of 64 outputs and 128 inputs an element is, by `operands.pack_tiles`."""
    a, b, c = n % 64 // 16, n // 8 % 2, n % 8
    pair = (k // 2 % 4 * 4 + k // 8 % 4) * 2 + k % 2
    high, low = k // 64 % 2, k // 32 % 2
    if BITS == 8:
        place = ((((high * 2 + b) * 4 + a) * 8 + c) * 32 + pair) * 2 + low
    else:
        place = (((b * 4 + a) * 8 + c) * 32 + pair) * 2 + high
    return place


@triton.jit
def gather_kernel(
    ids, packed, scale, out, N, K,
    LAYOUT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (token, piece of its row); `GROUP` is 0 for one scale an output."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.load(ids + t)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = k < K
    if LAYOUT == "tiles":
        tile = (k // 128) * (N // 64) + n // 64
        q = tl.load(packed + tile * (1024 * BITS) + byte_of_tile(n, k, BITS), mask=real, other=0)
        q = q.to(tl.int32)
        if BITS == 4:
            q = (q >> (k // 32 % 2 * 4)) & 15
    elif LAYOUT == "runs":
        q = tl.load(packed + (k // 128).to(tl.int64) * N * 128 + n * 128 + k % 128, mask=real)
    else:
        q = tl.load(packed + n * K + k, mask=real)
    s = tl.load(scale + n + (k // GROUP * N if GROUP else 0 * k), mask=real)
    if ZERO:
        z = s & ((1 << BITS) - 1)
        q -= z
        s = (s - z).to(tl.float32, bitcast=True)
    elif LAYOUT == "tiles":
        q -= 1 << (BITS - 1)
    y = q.to(tl.float32) * s.to(tl.float32)
    tl.store(out + t * K + k, y.to(out.dtype.element_ty), mask=real)


def gather_rows(
    ids: Tensor,
    packed: Tensor,
    scale: Tensor,
    size: tuple[int, int],
    dtype: torch.dtype,
    layout: Layout,
    *,
    bits: int = 8,
    group: int = 0,
    zero_points: bool = False,
) -> Tensor:
    """Rows of a weight.

    Args:
        ids: int64 [T].
        packed: The weight: bytes of `operands.pack_tiles` (`tiles`), int8 [K / 128, N, 128]
            (`runs`), or e4m3 [N, K] (`rows`).
        scale: [groups, N] as `packing.lay_scales` gives them, or [N].
        size: (N, K).
        layout: How the weight is laid out.
        bits: Of an element of tiles.
        group: Inputs that share a scale; 0 for all.
        zero_points: Whether the scales hold some.

    Returns:
        [T, K], rounded once.
    """
    outputs, inputs = size
    ids, out = ids.contiguous(), torch.empty((len(ids), inputs), dtype=dtype, device=packed.device)
    grid = (len(ids), triton.cdiv(inputs, WIDTH))
    if len(ids):
        gather_kernel[grid](
            ids, packed, scale, out, outputs, inputs, LAYOUT=layout, BITS=bits, GROUP=group,
            ZERO=zero_points, WIDTH=WIDTH,
        )  # fmt: skip
    return out
