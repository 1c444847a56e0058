"""How quantized weights of linear layers on a GPU are laid out: checks, scales, biases.

Quantized weights come as integers q [N, K] with scales and zero points of groups of inputs,

    w[n, k] = s[n, g] (q[n, k] - z[n, g]),        g = k / group,

and are laid out in tiles of 64 outputs by 128 inputs. The scales lie [groups, N], a row for each
step of a sum. Groups of more than 128 inputs are cut into groups of 128. A zero point of b bits is
put, as z + 2^(b-1), into the last b bits of its scale in fp32: one load brings both, of 4 bytes,
which can be asynchronous. Scales of 16 bits lose nothing; those of fp32 keep 20 (b = 4) or 16 bits.

Whatever packs a weight takes several of one shape too, [E, N, K], with scales, zero points and
biases likewise, by the calls of one: what is in memory then has this dimension before its own.
"""

from __future__ import annotations

import torch
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
