"""A quantized weight, and the tensors that stand for it in the compressed-tensors layout.

    int-quantized      X.weight int8 [N, K], X.weight_scale [N, 1]
    float-quantized    X.weight float8_e4m3fn [N, K], X.weight_scale [1], [N, 1] or by block
    pack-quantized     X.weight_packed int32 [N, K b / 32], X.weight_scale [N, groups],
                       X.weight_shape int64 [2], X.weight_zero_point int32 [N b / 32, groups]

Source: compressed-tensors 0.17 to 0.20. Shapes are exactly these: loaders refuse others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from formats.errors import CheckpointError
from formats.pack import pack_words, unpack_words
from formats.scheme import LayerScheme, WeightSpec

Kind = Callable[[str], tuple[torch.dtype, tuple[int, ...]]]
LEAVES = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point")


@dataclass(frozen=True)
class StoredWeight:
    """The weight of a linear layer, quantized: w = (q - zero_point) * scale.

    Attributes:
        q: [N, K], int8 (int4 too, in [-8, 7]) or float8_e4m3fn.
        scale: fp32, one element a block of the scheme: [N, 1], [N, groups], [1, 1] or
            [row blocks, column blocks].
        zero_point: int8 of the scale's shape, or None for symmetric quantization.
    """

    q: Tensor
    scale: Tensor
    zero_point: Tensor | None = None


def storage_format(scheme: LayerScheme) -> str:
    """compressed-tensors' name for how the weights of a scheme are laid out."""
    assert scheme.weights is not None
    if scheme.weights.dtype == "fp8_e4m3":
        return "float-quantized"
    plain = scheme.weights.dtype == "int8" and scheme.activations is not None
    return "int-quantized" if plain else "pack-quantized"


def scale_shape(spec: WeightSpec, shape: tuple[int, int]) -> tuple[int, int]:
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
        scheme: Of the layer.
        weight: To be stored.
        dtype: The model's: packed weights keep their scales in it, which must hold them exactly.
    """
    assert scheme.weights is not None
    layout, scale = storage_format(scheme), weight.scale.float()
    if layout != "pack-quantized":
        scale = scale.reshape(1) if scheme.weights.granularity == "per_tensor" else scale
        return {"weight": weight.q, "weight_scale": scale}
    bits = scheme.weights.bits
    if not torch.equal(scale.to(dtype).float(), scale):
        raise CheckpointError(f"scales of a packed weight are not representable in {dtype}")
    tensors = {
        "weight_packed": pack_words(weight.q, bits),
        "weight_scale": scale.to(dtype),
        "weight_shape": torch.tensor(weight.q.shape, dtype=torch.int64),
    }
    if weight.zero_point is not None:
        tensors["weight_zero_point"] = pack_words(weight.zero_point.T, bits).T.contiguous()
    return tensors


def needed_leaves(scheme: LayerScheme) -> set[str]:
    """Last parts of the names of a quantized weight's tensors."""
    assert scheme.weights is not None
    if storage_format(scheme) != "pack-quantized":
        return {"weight", "weight_scale"}
    leaves = {"weight_packed", "weight_scale", "weight_shape"}
    return leaves if scheme.weights.symmetric else leaves | {"weight_zero_point"}


def check_weight(
    scheme: LayerScheme, module: str, kind: Kind, read: Callable[[str], Tensor]
) -> None:
    """Check the tensors of a weight; only scales and shapes are read, not the weight itself.

    Args:
        scheme: Of the layer.
        module: Full name of the layer.
        kind: Gives the type and shape of a tensor by its full name.
        read: Gives a tensor by its full name.

    Raises:
        CheckpointError: a tensor has another type or shape than the scheme says, or a scale is not
            finite and positive.
    """
    assert scheme.weights is not None
    spec, layout = scheme.weights, storage_format(scheme)
    if layout == "pack-quantized":
        _expect(f"{module}.weight_shape", kind, torch.int64, (2,))
        shape = _shape(read(f"{module}.weight_shape"))
        words = math.ceil(shape[1] * spec.bits / 32)
        _expect(f"{module}.weight_packed", kind, torch.int32, (shape[0], words))
        if not spec.symmetric:
            wanted = (math.ceil(shape[0] * spec.bits / 32), scale_shape(spec, shape)[1])
            _expect(f"{module}.weight_zero_point", kind, torch.int32, wanted)
    else:
        shape = kind(f"{module}.weight")[1]
        if len(shape) != 2:
            raise CheckpointError(f"{module}.weight has shape {shape}; needed is [N, K]")
        wanted_type = torch.float8_e4m3fn if layout == "float-quantized" else torch.int8
        _expect(f"{module}.weight", kind, wanted_type, shape)
        shape = (shape[0], shape[1])
    wanted = scale_shape(spec, shape)
    shapes = ((1,), ()) if spec.granularity == "per_tensor" else (wanted,)
    check_scale(f"{module}.weight_scale", read(f"{module}.weight_scale"), shapes)


def read_weight(
    scheme: LayerScheme, module: str, read: Callable[[str], Tensor], out: Tensor | None = None
) -> StoredWeight:
    """Inverse of `weight_tensors`, of tensors that `check_weight` has seen.

    Args:
        scheme: Of the layer.
        module: Full name of the layer.
        read: Gives a tensor by its full name.
        out: Gets the integers: [N, K] of their type, such as rows of a larger weight; or None.
    """
    assert scheme.weights is not None
    spec, scale = scheme.weights, read(f"{module}.weight_scale").float()
    if storage_format(scheme) != "pack-quantized":
        q = read(f"{module}.weight")
        q = q if out is None else out.copy_(q)
        return StoredWeight(q, scale.reshape(scale_shape(spec, _shape(q.shape))))
    rows, columns = _shape(read(f"{module}.weight_shape"))
    q = unpack_words(read(f"{module}.weight_packed"), spec.bits, columns, out)
    if spec.symmetric:
        return StoredWeight(q, scale)
    zeros = read(f"{module}.weight_zero_point").T.contiguous()
    return StoredWeight(q, scale, unpack_words(zeros, spec.bits, rows).T.contiguous())


def _shape(sizes: Iterable[Any]) -> tuple[int, int]:
    rows, columns = (int(size) for size in sizes)
    return rows, columns


def check_scale(name: str, scale: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Refuse a scale of another type or shape, or one that is not finite and positive."""
    if not scale.dtype.is_floating_point or tuple(scale.shape) not in shapes:
        raise CheckpointError(
            f"{name} is {scale.dtype} {tuple(scale.shape)}; needed is a float tensor of shape "
            f"{' or '.join(map(str, shapes))}"
        )
    wide = scale.float()
    good = torch.isfinite(wide) & (wide > 0)
    if not bool(good.all()):
        raise CheckpointError(
            f"{name} holds {wide[~good].flatten()[0].item()}; a scale is finite and positive. The "
            "checkpoint is damaged or was written by faulty software; write it again"
        )


def _expect(name: str, kind: Kind, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    found = kind(name)
    if found != (dtype, shape):
        raise CheckpointError(f"{name} is {found[0]} {found[1]}; needed is {dtype} {shape}")
