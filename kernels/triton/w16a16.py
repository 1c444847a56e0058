"""W16A16: fp16 or bf16 weights and activations, few rows.

    y[m, n] = sum_k x[m, k] w[n, k] + b[n],    sums in fp32

The weight stays [N, K], where cuBLAS, which takes calls of many rows, reads it too. Its bytes are
all that counts: `kernels.triton.stream`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton.common import Workspace, require
from kernels.triton.stream import stream
from kernels.triton.tuning import Tile, gemm_tile
from kernels.triton.weights import BLOCK, check_inputs

LIBRARY_ROWS = 64  # beyond these cuBLAS takes it
FLOATS = (torch.float16, torch.bfloat16)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `w16a16_linear` is for a product: few rows on a GPU, sizes that tiles divide."""
    return (
        x.is_cuda
        and 0 < x.shape[0] <= LIBRARY_ROWS
        and weight.dtype in FLOATS
        and x.dtype == weight.dtype
        and x.is_contiguous()
        and weight.is_contiguous()
        and weight.shape[0] % 64 == 0
        and weight.shape[1] % BLOCK == 0
    )


def w16a16_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    workspace: Workspace,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """x W^T + bias.

    Args:
        x: fp16 or bf16 [M, K], contiguous.
        weight: [N, K] of that type, contiguous; N a multiple of 64, K of 128.
        bias: Float [N] or None.
        workspace: Of the stream that this runs in.
        out_dtype: Element type of the result; by default that of x.
        tile: How to cut it; by default the device's table says.

    Returns:
        [M, N] in `out_dtype`.

    Raises:
        ValueError: a shape or type does not fit, or the workspace is too small.
    """
    require(
        weight.dim() == 2
        and weight.dtype in FLOATS
        and weight.is_contiguous()
        and weight.shape[0] % 64 == 0
        and weight.shape[1] % BLOCK == 0,
        f"weight is {weight.dtype} {tuple(weight.shape)}; needed is contiguous float16 or bfloat16 "
        f"[N, K], N in 64s and K in {BLOCK}s",
    )
    (rows, inputs), outputs = x.shape, weight.shape[0]
    check_inputs(x, (weight.dtype,), weight.shape[1])
    out = torch.empty((rows, outputs), dtype=out_dtype or x.dtype, device=x.device)
    if rows:
        tile = tile or gemm_tile("w16a16", x.device, rows, outputs, inputs)
        stream(x, weight, out, bias, workspace, tile)
    return out
