"""Every op of `kernels.ops` but attention in plain torch: its specification, and what runs where
there are no compiled kernels.

Arguments and results are those of the op of the same name. Two promises hold here as there: what is
rounded to integers has the same bits as in the compiled kernels, and a row has the same bits
whatever other rows share the call. For the second, only operations are used whose result for an
element does not depend on where the element is: `torch.exp` has one code for whole vectors and
for remainders, `torch.sigmoid` and `F.silu` have two, which differ in the last bit.

Integer products: the integers are held in fp32, where products of two of them add up exactly as
long as the sum stays below 2^24. 127 * 128 * 1024 does, so inputs are cut into runs of at most 1024
and the runs' sums, exact integers each, are added in int32. That is exact on every processor;
torch's own int8 products are not (without VNNI, oneDNN multiplies with an instruction that
saturates) or are ten times slower than fp32 (`torch._int_mm`, without VNNI).

Float products: how MKL cuts a product, and with it the order of its sums, depends on how many rows
there are (with AVX-512 at any number of them, with AVX2 at 1 to 3). Rows therefore go through
products of 16 at a time, the last of them padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.numerics import (
    FP8,
    INT4,
    INT8,
    block_absmax,
    choose_scale,
    fake_quantize_activations,
    quantize,
)
from kernels.op_inputs import KV_BLOCK, Activation, Clamped, Gate, KVPool
from kernels.packed_cache import compensated, pack_halves, token_scales, turned

RANKS, LANES = 4, 16  # that lie together, as in csrc/api.h


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to some outputs of a layer; made by `of`.

    Attributes:
        a: A, fp32 or bf16 [r / 4, K / 16, 4, 16], filled up with zeros.
        b: B transposed, its factor multiplied in, likewise.
        first: The first of the outputs.
        inputs: K.
        outputs: n.
    """

    a: Tensor
    b: Tensor
    first: int
    inputs: int
    outputs: int

    @classmethod
    def of(cls, a: Tensor, b: Tensor, first: int, dtype: torch.dtype) -> Self:
        """Held in a type: a [r, K], b [n, r]."""
        return cls(_held(a, dtype), _held(b.T, dtype), first, a.shape[1], len(b))

    @property
    def rank(self) -> int:
        """r, with what fills it up."""
        return RANKS * len(self.a)

    def of_row(self, x: Tensor) -> Tensor:
        """B (A x) of a row fp32 [K], or longer: fp32 [n]."""
        a, b = (t.float().transpose(1, 2).flatten(2).flatten(0, 1) for t in (self.a, self.b))
        return (a[:, : self.inputs] @ x[: self.inputs]) @ b[:, : self.outputs]


def _held(rows: Tensor, dtype: torch.dtype) -> Tensor:
    ranks, size = rows.shape
    filled = F.pad(rows, (0, -size % LANES, 0, -ranks % RANKS)).to(dtype)
    return filled.unflatten(1, (-1, LANES)).unflatten(0, (-1, RANKS)).transpose(1, 2).contiguous()


RUN = 1024  # inputs whose int8 products add up exactly in fp32: 127 * 128 * 1024 < 2^24
ROWS = 16  # of one float product
_BY_STORAGE = {INT8.storage: INT8, FP8.storage: FP8, torch.uint8: INT4}  # of a cache


def quantize_static(x: Tensor, scale: Tensor) -> Tensor:
    """See `kernels.ops.quantize_static`."""
    return quantize(x, scale.reshape(()))


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.ops.quantize_per_token`."""
    if x.shape[0] == 0:
        return x.to(torch.int8), x.new_empty((0, 1), dtype=torch.float32)
    scale = choose_scale(block_absmax(x, (1, -1)))
    return quantize(x, scale), scale


def fake_quantize_fp8(x: Tensor, scale: Tensor | None, group: int) -> Tensor:
    """See `kernels.ops.fake_quantize_fp8`."""
    return fake_quantize_activations(x, scale, FP8, group)


def int8_linear(
    xq: Tensor,
    x_scale: Tensor,
    q: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """acc * (x_scale * w_scale) + bias, with acc exact; see `kernels.ops.linear`.

    Args:
        xq: int8 [T, K], in [-127, 127].
        x_scale: fp32, one element or [T, 1].
        q: Integers [N, K] in [-128, 127], as int8 or held in fp32.
        w_scale: fp32 [N].
        bias: fp32 [N] or None.
        out_dtype: Element type of the result.

    Returns:
        [T, N].
    """
    x, weight = xq.float(), q.float()
    if x.shape[1] <= RUN:
        total = F.linear(x, weight)
    else:
        runs = zip(x.split(RUN, dim=1), weight.split(RUN, dim=1), strict=True)
        total = torch.as_tensor(sum(F.linear(a, w).to(torch.int32) for a, w in runs)).float()
    scale = x_scale.reshape(-1, 1) if x_scale.numel() > 1 else x_scale.reshape(())
    out = total * (scale * w_scale)
    return (out if bias is None else out + bias).to(out_dtype)


def float_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias in the type of `weight`, [N, K]; see `kernels.ops.linear`."""
    out = product(x.to(weight.dtype), weight.T)
    return out if bias is None else out + bias


def product(x: Tensor, y: Tensor) -> Tensor:
    """Float `x` [..., T, K] times `y` [..., K, N], in products of 16 rows."""
    rows = x.shape[-2]
    parts = F.pad(x, (0, 0, 0, -rows % ROWS)).split(ROWS, dim=-2)
    return torch.cat([part @ y for part in parts], dim=-2)[..., :rows, :]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.ops.rms_norm`."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * (wide * inverse)).to(x.dtype)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, form: Gate) -> Tensor:
    """RMSNorm with a gate as `form` says; x and gate [..., H], weight [H]: like x."""
    wide, factor = x.float(), gate.float()
    factor = _silu(factor) if form.silu else torch.sigmoid(factor)
    parts = (wide * factor if form.first else wide).unflatten(-1, (form.groups, -1))
    y = rms_norm(parts, weight.view(form.groups, -1), eps).flatten(-2)
    return (y if form.first else y * factor).to(x.dtype)


def gated_product(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """See `kernels.ops.gated_product`."""
    wide, other = gate.float(), up.float()
    if isinstance(activation, Clamped):
        wide = wide.clamp(max=activation.bound)
        other = other.clamp(-activation.bound, activation.bound) + 1.0
        return (wide / (1.0 + torch.exp(-activation.slope * wide)) * other).to(gate.dtype)
    return (_ACTIVATIONS[activation](wide) * other).to(gate.dtype)


def _silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def _gelu_tanh(x: Tensor) -> Tensor:
    """x (1 + tanh u) / 2, which is x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    double = (8 / math.pi) ** 0.5 * (x + 0.044715 * x * x * x)
    return x / (1.0 + torch.exp(-double))


def _gelu(x: Tensor) -> Tensor:
    """x Phi(x), Phi(x) = erfc(-x / sqrt 2) / 2."""
    return x * (0.5 * torch.erfc(x * -(0.5**0.5)))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": _gelu,
}


def add_lora(x: Tensor, y: Tensor, slots: Tensor, of: Callable[[int], Iterable[LowRank]]) -> Tensor:
    """See `kernels.ops.add_lora`; row by row, so that none depends on another. `of` gives the parts
    of a slot."""
    sums = y.to(torch.float32, copy=True)
    for i, slot in enumerate(slots.tolist()):
        for part in of(slot) if slot >= 0 else ():
            sums[i, part.first : part.first + part.outputs] += part.of_row(x[i].float())
    return sums.to(y.dtype)


def softcapped(x: Tensor, bound: float) -> Tensor:
    """See `kernels.ops.softcapped`."""
    return torch.tanh(x / bound) * bound


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.ops.apply_rope`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, D]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def turn_heads(x: Tensor, size: int) -> Tensor:
    """See `kernels.ops.turn_heads`."""
    return turned(x, size)


def write_kv(
    k: Tensor, v: Tensor, pool: KVPool, slots: Tensor, positions: Tensor | None = None
) -> None:
    """See `kernels.ops.write_kv`."""
    block, offset = slots // KV_BLOCK, slots % KV_BLOCK
    if pool.k_offset is not None:
        k = k.float() - pool.k_offset
    if pool.sink_k is not None and pool.sink_v is not None:
        assert positions is not None
        own = positions < pool.sink_tokens
        for x, held in ((k, pool.sink_k), (v, pool.sink_v)):
            held[block[own], :, positions[own]] = x[own].to(held.dtype)
    for x, held, scale, feedback in (
        (k, pool.k, pool.k_scale, pool.k_feedback),
        (v, pool.v, pool.v_scale, None),
    ):
        if scale is None:
            held[block, :, offset] = x.to(held.dtype)
            continue
        kind = _BY_STORAGE[held.dtype]
        if pool.dynamic:
            own = (
                token_scales(x) if kind is INT4 else choose_scale(block_absmax(x, (1, 1, -1)), kind)
            )
            own = own.to(scale.dtype).float()  # [T, Hkv, 1], as it is held
            scale[block, :, offset] = own[..., 0].to(scale.dtype)
        else:
            own = scale.reshape(1, scale.shape[0], -1)  # [1, Hkv, 1 or D]
        q = quantize(x, own, kind) if feedback is None else compensated(x, own, feedback)
        held[block, :, offset] = pack_halves(q) if kind is INT4 else q
