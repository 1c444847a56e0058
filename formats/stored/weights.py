"""A quantized weight, and the tensors that stand for it in the compressed-tensors layout.

    int-quantized      X.weight int8 [N, K], X.weight_scale [N, 1]
    float-quantized    X.weight float8_e4m3fn [N, K], X.weight_scale [1], [N, 1] or by block
    pack-quantized     X.weight_packed int32 [N, K b / 32], X.weight_scale [N, groups],
                       X.weight_shape int64 [2], X.weight_zero_point int32 [N b / 32, groups],
                       or fp32 [N, groups] of float zero points
    mxfp4-pack-quantized
                       X.weight_packed uint8 [N, K / 2], X.weight_scale uint8 [N, K / 32]; see
                       `formats.pack`
    nvfp4-pack-quantized
                       X.weight_packed uint8 [N, K / 2], X.weight_scale float8_e4m3fn [N, K / 16],
                       X.weight_global_scale fp32 [1], by which scales are divided
    mxfp8-quantized    X.weight float8_e4m3fn [N, K], X.weight_scale uint8 [N, K / 32]

Packed weights have scales of the model's type; of a layer with some that fp16 would round by more
than 1%, being so small, all are fp32.

Source: compressed-tensors 0.17 to 0.20. Shapes are exactly these: loaders refuse others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from formats.errors import CheckpointError
from formats.pack import (
    NAN,
    least_unit,
    pack_elements,
    pack_powers,
    pack_words,
    unpack_elements,
    unpack_powers,
    unpack_words,
)
from formats.scheme import LayerScheme, WeightSpec

Kind = Callable[[str], tuple[torch.dtype, tuple[int, ...]]]
Shape = tuple[int, ...]  # outputs and inputs
MXFP4, NVFP4, MXFP8 = "mxfp4-pack-quantized", "nvfp4-pack-quantized", "mxfp8-quantized"
FP8 = torch.float8_e4m3fn
_DAMAGED = "the checkpoint is damaged or was written by faulty software; write it again"
LEAVES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_global_scale",
)


@dataclass(frozen=True)
class StoredWeight:
    """The weight of a linear layer, quantized: w = (q - zero_point) * scale.

    Attributes:
        q: [N, K], int8 (int4 too, in [-8, 7]) or float8_e4m3fn (fp4 too); of several layers that
            were read as one N is their sum, as are the rows of all others.
        scale: fp32, one element a block of the scheme: [N, 1], [N, groups], [1, 1] or
            [row blocks, column blocks].
        zero_point: Of the scale's shape, int8, or fp32 where the scheme has float zero points;
            None for symmetric quantization.
        order: int64 [layers, K], the input that each column of a layer belongs to, where groups are
            not neighbouring inputs (GPTQ's act-order); None where column k is input k's.
        unit: fp32 [N, 1], what the scales of NVFP4 are e4m3 multiples of; None for others.
    """

    q: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    order: Tensor | None = None
    unit: Tensor | None = None

    @property
    def zeros(self) -> Tensor:
        """Zero points of the scale's shape, 0 where there are none."""
        zeros = self.zero_point
        return torch.zeros_like(self.scale, dtype=torch.int8) if zeros is None else zeros

    def rows(self, rows: Tensor | slice) -> StoredWeight:
        """Some rows, whose scales are an output's each."""
        zeros = None if self.zero_point is None else self.zero_point[rows]
        return replace(self, q=self.q[rows], scale=self.scale[rows], zero_point=zeros)

    def to(self, device: torch.device) -> StoredWeight:
        """The same on another device; itself where it is there."""
        q = self.q.to(device)
        if q is self.q:
            return self
        rest = (self.zero_point, self.order, self.unit)
        moved = (None if x is None else x.to(device) for x in rest)
        return StoredWeight(q, self.scale.to(device), *moved)


def join_weights(weights: Sequence[StoredWeight]) -> StoredWeight:
    """Weights of one scheme and as many inputs as one, one below the other."""
    if len(weights) == 1:
        return weights[0]
    zeros = [weight.zero_point for weight in weights if weight.zero_point is not None]
    q = torch.cat([weight.q.view(torch.int8) for weight in weights]).view(weights[0].q.dtype)
    orders = None
    if any(weight.order is not None for weight in weights):
        plain = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
        orders = torch.cat([plain if w.order is None else w.order for w in weights])
    scale = torch.cat([weight.scale for weight in weights])
    units = [weight.unit for weight in weights if weight.unit is not None]
    unit = torch.cat(units) if units else None
    return StoredWeight(q, scale, torch.cat(zeros) if zeros else None, orders, unit)


def storage_format(scheme: LayerScheme) -> str:
    """compressed-tensors' name for how the weights of a scheme are laid out."""
    assert scheme.weights is not None
    kind = scheme.weights.dtype
    if scheme.weights.scale_type == "e4m3":
        return NVFP4
    if scheme.weights.scale_type == "e8m0":
        return MXFP4 if kind == "fp4_e2m1" else MXFP8
    if kind == "fp8_e4m3":
        return "float-quantized"
    plain = scheme.weights.dtype == "int8" and scheme.activations is not None
    return "int-quantized" if plain else "pack-quantized"


def scale_shape(spec: WeightSpec, shape: Shape) -> tuple[int, int]:
    """Shape of the scales of a weight [N, K]."""
    rows, columns = (
        1 if length == -1 else -(-size // length)
        for size, length in zip(shape, spec.block, strict=True)
    )
    return rows, columns


def weight_tensors(
    scheme: LayerScheme, weight: StoredWeight, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of a weight by the last part of their name.

    Args:
        dtype: The model's: packed weights keep their scales in it, or in fp32 where it does not
            hold them exactly.
    """
    assert scheme.weights is not None
    if weight.order is not None:
        raise CheckpointError(
            "g_idx is not sorted (act-order): its groups are no neighbouring inputs, which only "
            "GPTQ's own layout expresses"
        )
    layout, scale = storage_format(scheme), weight.scale.float()
    if layout in (MXFP4, MXFP8):
        q = {"weight": weight.q} if layout == MXFP8 else {"weight_packed": pack_elements(weight.q)}
        return q | {"weight_scale": pack_powers(scale)}
    if layout == NVFP4:
        return {"weight_packed": pack_elements(weight.q)} | _e4m3_scales(scale, weight.unit)
    if layout != "pack-quantized":
        scale = scale.reshape(1) if scheme.weights.granularity == "per_tensor" else scale
        return {"weight": weight.q, "weight_scale": scale}
    bits = scheme.weights.bits
    held = scale.to(dtype)
    tensors = {
        "weight_packed": pack_words(weight.q, bits),
        "weight_scale": held if torch.equal(held.float(), scale) else scale,
        "weight_shape": torch.tensor(weight.q.shape, dtype=torch.int64),
    }
    if scheme.weights.float_zeros and weight.zero_point is not None:
        tensors["weight_zero_point"] = weight.zero_point
    elif weight.zero_point is not None:
        tensors["weight_zero_point"] = pack_words(weight.zero_point.T, bits).T.contiguous()
    return tensors


def _e4m3_scales(scale: Tensor, unit: Tensor | None) -> dict[str, Tensor]:
    """NVFP4's scales, with one unit for all, as they are stored.

    Raises:
        CheckpointError: they are no e4m3 multiples of it.
    """
    one = least_unit(scale) if unit is None else unit[0, 0]
    stored = (scale / one).to(torch.float8_e4m3fn)
    if not torch.allclose(stored.float() * one, scale, rtol=1e-6, atol=0.0):
        raise CheckpointError(f"scales of an NVFP4 weight are no e4m3 multiples of {one.item():g}")
    return {"weight_scale": stored, "weight_global_scale": (1 / one).reshape(1)}


def scale_in_table(spec: WeightSpec, weight: StoredWeight) -> Tensor:
    """`weight_scale` as the scale table sees it: fp32, in the shape that is stored."""
    if spec.scale_type == "e4m3":
        return weight.scale / (least_unit(weight.scale) if weight.unit is None else weight.unit)
    return weight.scale.reshape(1) if spec.granularity == "per_tensor" else weight.scale


def needed_leaves(scheme: LayerScheme) -> set[str]:
    """Last parts of the names of a quantized weight's tensors."""
    return set(tensor_kinds(scheme, (1, 1), torch.float32))


def check_weight(scheme: LayerScheme, module: str, shape: Shape, kind: Kind) -> None:
    """Check the types and shapes of a weight's tensors; nothing is read.

    Args:
        kind: Gives the type and shape of a tensor by its full name.

    Raises:
        CheckpointError: a tensor has another type or shape than the scheme says.
    """
    assert scheme.weights is not None
    if len(shape) != 2:
        raise CheckpointError(f"{module}.weight has shape {shape}; needed is [N, K]")
    for leaf, (dtype, wanted) in tensor_kinds(scheme, shape, torch.float32).items():
        if leaf == "weight_scale" and dtype == torch.float32:
            either = (wanted, ()) if wanted == (1,) else (wanted,)
            check_scale_kind(f"{module}.{leaf}", kind, either)
        else:
            expect(f"{module}.{leaf}", kind, dtype, wanted)


def tensor_kinds(
    scheme: LayerScheme, shape: Shape, dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of each tensor of a weight [N, K], by the last part of its name.

    Args:
        dtype: Of scales.
    """
    assert scheme.weights is not None
    spec, layout = scheme.weights, storage_format(scheme)
    groups = scale_shape(spec, shape)
    if spec.scale_type != "float":
        packed = (torch.uint8, (shape[0], shape[1] // 2))
        q = {"weight": (FP8, shape)} if layout == MXFP8 else {"weight_packed": packed}
        if layout != NVFP4:
            return q | {"weight_scale": (torch.uint8, groups)}
        return q | {"weight_scale": (FP8, groups), "weight_global_scale": (torch.float32, (1,))}
    scales = (1,) if spec.granularity == "per_tensor" else groups
    if layout != "pack-quantized":
        q = FP8 if layout == "float-quantized" else torch.int8
        return {"weight": (q, shape), "weight_scale": (dtype, scales)}

    def words(values: int) -> int:
        return math.ceil(values * spec.bits / 32)

    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "weight_packed": (torch.int32, (shape[0], words(shape[1]))),
        "weight_scale": (dtype, scales),
        "weight_shape": (torch.int64, (2,)),
    }
    if spec.float_zeros:
        kinds["weight_zero_point"] = (torch.float32, groups)
    elif not spec.symmetric:
        kinds["weight_zero_point"] = (torch.int32, (words(shape[0]), groups[1]))
    return kinds


def read_weights(
    scheme: LayerScheme, shapes: Sequence[Shape], read: Callable[[str], Tensor]
) -> StoredWeight:
    """Inverse of `weight_tensors`, of tensors that `check_weight` has seen.

    Args:
        scheme: Of the layer, or of several that are read as one.
        shapes: Of the weight of each; they have the same inputs.
        read: Gives a tensor by the last part of its name: all layers', one below the other.

    Raises:
        CheckpointError: a scale of MXFP4 is NaN, or a float zero point is not finite.
    """
    assert scheme.weights is not None
    spec, columns = scheme.weights, shapes[0][1]
    q = unpack_elements(read("weight_packed")) if spec.dtype == "fp4_e2m1" else None
    if spec.scale_type == "e8m0":
        powers = read("weight_scale")
        if bool((powers == NAN).any()):
            raise CheckpointError(f"weight_scale holds {NAN}, which is NaN; {_DAMAGED}")
        return StoredWeight(read("weight") if q is None else q, unpack_powers(powers))
    if q is not None:
        divisors = read("weight_global_scale")
        check_scale_values("weight_global_scale", divisors)
        rows = torch.tensor([rows for rows, _ in shapes], device=q.device)
        divisor = divisors.repeat_interleave(rows).unsqueeze(1)
        return StoredWeight(q, read("weight_scale").float() / divisor, unit=1 / divisor)
    scale = read("weight_scale").float().reshape(-1, scale_shape(spec, shapes[0])[1])
    if storage_format(scheme) != "pack-quantized":
        return StoredWeight(read("weight"), scale)
    q = unpack_words(read("weight_packed"), spec.bits, columns)
    if spec.symmetric:
        return StoredWeight(q, scale)
    words, count = read("weight_zero_point"), 32 // spec.bits
    if spec.float_zeros:
        if not bool(words.isfinite().all()):
            raise CheckpointError(f"weight_zero_point holds NaN or infinity; {_DAMAGED}")
        return StoredWeight(q, scale, words)
    zeros = unpack_words(words.T.contiguous(), spec.bits, len(words) * count)
    rows = [rows for rows, _ in shapes]
    held = [math.ceil(n / count) * count for n in rows]
    if held != rows:
        own = zip(zeros.split(held, dim=1), rows, strict=True)
        zeros = torch.cat([part[:, :n] for part, n in own], dim=1)
    return StoredWeight(q, scale, zeros.T.contiguous())


def check_scale(name: str, scale: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    """Refuse a scale of another type or shape, or one that is not finite and positive."""
    check_scale_kind(name, lambda _: (scale.dtype, tuple(scale.shape)), shapes)
    check_scale_values(name, scale)


def check_scale_kind(name: str, kind: Kind, shapes: Sequence[tuple[int, ...]]) -> None:
    """Refuse a scale that is not of floats, or has none of some shapes."""
    dtype, shape = kind(name)
    if not dtype.is_floating_point or shape not in shapes:
        raise CheckpointError(
            f"{name} is {dtype} {shape}; needed is a float tensor of shape "
            f"{' or '.join(map(str, shapes))}"
        )


def check_scale_values(name: str, scale: Tensor) -> None:
    """Refuse a scale that is not finite and positive."""
    if not is_scale(scale):
        wide = scale.float()
        good = torch.isfinite(wide) & (wide > 0)
        raise CheckpointError(
            f"{name} holds {wide[~good].flatten()[0].item()}; a scale is finite and positive. "
            f"{_DAMAGED}"
        )


def is_scale(values: Tensor) -> bool:
    """Whether all are finite and positive."""
    wide = values.float()
    return bool((torch.isfinite(wide) & (wide > 0)).all())


def expect(name: str, kind: Kind, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another type or shape."""
    found = kind(name)
    if found != (dtype, shape):
        raise CheckpointError(f"{name} is {found[0]} {found[1]}; needed is {dtype} {shape}")
