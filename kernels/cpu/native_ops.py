"""The ops on rows of the compiled kernels; attention's are in `native_attention`.

The functions have the contracts of those of the same name in `kernels.ops`. The kernels take fp32;
activations of other types are widened on the way in and rounded on the way out.

Low-rank adapters of linear layers are among them (LoRA; Hu et al. 2021, arXiv 2106.09685). A row of
a layer's result gets y += B (A x) of the adapter that its token has. Several adapters are held side
by side, by slot; layers that were merged (q, k and v) have a part each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import addressof, c_int32

import torch
from torch import Tensor

from kernels.cpu import native
from kernels.cpu.structures import (
    ACTIVATIONS,
    FORMATS,
    STORAGE_NAMES,
    Lora,
    LoraPart,
    QuantizeArgs,
    pointer,
)
from kernels.op_inputs import Named
from kernels.reference import LowRank


class LoraTable:
    """The adapters of linear layers, which compiled kernels read where they are.

    Args:
        linears: How many layers there are.
    """

    def __init__(self, linears: int) -> None:
        self._linears = linears
        self._held: list[Mapping[int, Sequence[LowRank]]] = []  # by slot, then layer
        self._parts: list[list[ctypes.Array[LoraPart]]] = []  # what the table points to
        self._table = (Lora * 0)()

    @property
    def address(self) -> int:
        """Of the compiled kernels' table, [slots, layers]; another one once a slot was added."""
        return ctypes.addressof(self._table)

    def put(self, slot: int, layers: Mapping[int, Sequence[LowRank]]) -> None:
        """Hold an adapter in a slot, in the place of what was there.

        Args:
            layers: What it adds, by the layer's number; nothing to others.
        """
        while len(self._held) <= slot:
            self._held.append({})
            self._parts.append([])
        if len(self._table) < len(self._held) * self._linears:
            wider = (Lora * (len(self._held) * self._linears))()
            ctypes.memmove(wider, self._table, ctypes.sizeof(self._table))
            self._table = wider
        self._held[slot], self._parts[slot] = layers, []
        for linear in range(self._linears):
            own = layers.get(linear, ())
            parts = (LoraPart * len(own))(*map(_part, own))
            self._parts[slot].append(parts)
            inputs = own[0].inputs if own else 0
            row = Lora(ctypes.addressof(parts), len(own), inputs)
            self._table[slot * self._linears + linear] = row

    def of(self, slot: int, linear: int) -> Sequence[LowRank]:
        """What the adapter in a slot adds to a layer."""
        return self._held[slot].get(linear, ())

    def add(self, x: Tensor, y: Tensor, slots: Tensor, linear: int) -> None:
        """`kernels.ops.add_lora`, by the compiled kernels: x fp32 [T, K], y fp32 [T, N]."""
        own = self.address + linear * ctypes.sizeof(Lora)
        native.call("lora", own, self._linears, slots, x, y, *x.shape, y.shape[1])


def _part(own: LowRank) -> LoraPart:
    kind = FORMATS[STORAGE_NAMES[own.a.dtype]]
    return LoraPart(own.a.data_ptr(), own.b.data_ptr(), own.rank, own.first, own.outputs, kind)


def quantize_static(x: Tensor, scale: Tensor) -> Tensor:
    """See `kernels.ops.quantize_static`; NaN becomes 0."""
    q = torch.empty(x.shape, dtype=torch.int8)
    _quantize(_matrix(x), "int8", x.shape[-1], _single(scale), q=q)
    return q


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.ops.quantize_per_token`."""
    q, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0], 1)
    _quantize(_matrix(x), "int8", x.shape[-1], q=q, scales=scales)
    return q, scales


def fake_quantize_fp8(x: Tensor, scale: Tensor | None = None, group: int = -1) -> Tensor:
    """What a linear layer with e4m3 activations sees of its input.

    Args:
        x: [..., K].
        scale: Static scale, one element, or None where scales follow from the data.
        group: Elements of a row that share a scale where it follows from the data; -1 for all. The
            last group may be shorter.

    Returns:
        fp32, of the shape of `x`; bit for bit `kernels.numerics.fake_quantize_activations`.
    """
    values = torch.empty(x.shape)
    group = x.shape[-1] if group == -1 else min(group, x.shape[-1])
    single = None if scale is None else _single(scale)
    _quantize(_matrix(x), "fp8_e4m3", group, single, values=values)
    return values


def linear(x: Tensor, packed: Tensor, x_scale: Tensor | None) -> Tensor:
    """See `kernels.ops.linear`; fp32 [T, N]."""
    inputs = native.header(packed).inputs
    if x.dim() != 2 or x.shape[1] != inputs:
        raise ValueError(f"x is {tuple(x.shape)}; the weight needs [T, {inputs}]")
    if (x.dtype == torch.int8) != (x_scale is not None):
        raise ValueError(f"x is {x.dtype}; integers need scales, and floats have none")
    if x_scale is not None and x_scale.numel() not in (1, len(x)):
        raise ValueError(f"{x_scale.numel()} scales for {len(x)} rows; needed is 1, or one a row")
    wide = x if x.dtype == torch.int8 else x.float()
    return native.linear(wide, packed, None if x_scale is None else x_scale.float())


def _quantize(
    x: Tensor,
    fmt: str,
    group: int,
    scale: Tensor | None = None,
    q: Tensor | None = None,
    values: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    if x.numel() == 0:
        return
    if group < 1:
        raise ValueError(f"group is {group}; needed is a positive number, or -1 for whole rows")
    problem = c_int32(0)
    args = QuantizeArgs(
        x.data_ptr(),
        x.shape[0],
        x.shape[1],
        x.stride(0),
        group,
        pointer(scale),
        FORMATS[fmt],
        *map(pointer, (q, values, scales)),
        addressof(problem),
    )
    native.call("quantize", args)
    native.report(problem)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.ops.rms_norm`."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight is {tuple(weight.shape)}; needed is [{x.shape[-1]}], as x has")
    rows, wide = _matrix(x), weight.float().contiguous()
    y = torch.empty(x.shape)
    native.call("rms_norm", rows, wide, eps, y, *rows.shape, rows.stride(0))
    return y.to(x.dtype)


def gated_product(gate: Tensor, up: Tensor, activation: Named = "silu") -> Tensor:
    """See `kernels.ops.gated_product`; `gate` and `up` may be halves of one tensor's columns."""
    if gate.shape != up.shape:
        raise ValueError(f"gate is {tuple(gate.shape)} and up {tuple(up.shape)}; they must agree")
    wide, other = _matrix(gate), _matrix(up)
    if wide.stride(0) != other.stride(0):
        wide, other = wide.contiguous(), other.contiguous()
    y, kind = torch.empty(gate.shape), ACTIVATIONS[activation]
    native.call("gated_product", wide, other, y, *wide.shape, wide.stride(0), kind)
    return y.to(gate.dtype)


def softcapped(x: Tensor, bound: float) -> Tensor:
    """See `kernels.ops.softcapped`."""
    wide, y = x.float().contiguous(), torch.empty(x.shape)
    native.call("softcap", wide, bound, y, wide.numel())
    return y.to(x.dtype)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.ops.apply_rope`."""
    tokens, _, dim = q.shape
    if cos.shape != (tokens, dim) or sin.shape != cos.shape or dim % 2:
        raise ValueError(
            f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}; needed are [T, D] as q has, "
            f"which is {tuple(q.shape)}, with an even D"
        )
    if k.shape[::2] != (tokens, dim):
        raise ValueError(f"k is {tuple(k.shape)}; needed are T and D of q, {tuple(q.shape)}")
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, y = native.tokens(x), torch.empty(x.shape)
    native.call("rope", tokens, cos, sin, y, *x.shape, tokens.stride(0))
    return y.to(x.dtype)


def turn_heads(x: Tensor, size: int) -> Tensor:
    """See `kernels.ops.turn_heads`."""
    if size < 1 or size & (size - 1) or x.shape[2] % size:
        raise ValueError(f"size is {size}; needed is a power of two that divides {x.shape[2]}")
    heads, y = native.tokens(x), torch.empty(x.shape)
    native.call("turn", heads, y, *x.shape, heads.stride(0), size)
    return y.to(x.dtype)


def _matrix(x: Tensor) -> Tensor:
    """[..., K] as fp32 [T, K] whose columns are adjacent; rows may be apart."""
    rows = x.float()
    rows = rows if rows.dim() == 2 else rows.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _single(scale: Tensor) -> Tensor:
    """A tensor of one element as fp32."""
    if scale.numel() != 1:
        raise ValueError(f"a static scale has one element; found {tuple(scale.shape)}")
    return scale.float()
