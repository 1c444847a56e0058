"""Linear layers on the CPU, of torch's fp32 matrix product.

int8: the integers are held in fp32, where products of two of them add up exactly as long as the sum
stays below 2^24. 127 * 128 * 1024 does, so inputs are cut into runs of at most 1024 and the runs'
sums, exact integers each, are added in int32. That is exact on every processor; torch's own int8
products are not (without VNNI, oneDNN multiplies with an instruction that saturates) or are ten
times slower than fp32 (`torch._int_mm`, without VNNI).

Rows: how MKL cuts a product, and with it the order of its sums, depends on how many rows there are
(with AVX-512 at any number of them, with AVX2 at 1 to 3). Rows therefore go through products of 16
at a time, the last of them padded: a row's bits do not depend on how many share the call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

RUN = 1024  # inputs whose int8 products add up exactly in fp32: 127 * 128 * 1024 < 2^24
ROWS = 16


def pack_int8(q: Tensor) -> Tensor:
    """int8 [N, K] as it is held for `int8_linear`: the same integers in fp32."""
    return q.to(torch.float32).contiguous()


def product(x: Tensor, y: Tensor) -> Tensor:
    """fp32 `x` [..., T, K] times `y` [..., K, N], in products of 16 rows."""
    rows = x.shape[-2]
    parts = F.pad(x, (0, 0, 0, -rows % ROWS)).split(ROWS, dim=-2)
    return torch.cat([part @ y for part in parts], dim=-2)[..., :rows, :]


def int8_linear(
    xq: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `kernels.ops.int8_linear`; `weight` fp32 [N, K] from `pack_int8`."""
    x = xq.float()
    if x.shape[1] <= RUN:
        total = F.linear(x, weight)
    else:
        runs = zip(x.split(RUN, dim=1), weight.split(RUN, dim=1), strict=True)
        total = sum(F.linear(a, w).to(torch.int32) for a, w in runs)
        total = torch.as_tensor(total).float()
    scale = x_scale.reshape(-1, 1) if x_scale.numel() > 1 else x_scale.reshape(())
    out = total * (scale * w_scale)
    if bias is not None:
        out = out + bias
    return out.to(out_dtype)


def float_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `kernels.ops.float_linear`."""
    out = product(x.to(weight.dtype), weight.T)
    return out if bias is None else out + bias
