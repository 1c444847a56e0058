"""What the foreign layouts share: their description, and strict reading.

A layout is a pair of pure functions between a `StoredWeight` and tensors; each of
`formats.foreign.settings.READERS` makes one from its settings. `formats.foreign.folder` reads a
folder by its layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from formats.errors import CheckpointError
from formats.scheme import BLOCK, WeightSpec
from formats.stored.weights import StoredWeight

Shape = tuple[int, ...]
RUN_SIZES = (-1, 32, 64, BLOCK)


@dataclass(frozen=True)
class Layout:
    """How a quantized linear layer is laid out in a foreign checkpoint.

    Attributes:
        name: For messages.
        leaves: Last parts of the names of a layer's tensors, all of them needed; the first has the
            integers, or codes.
        marker: The leaf that tells a quantized layer from another.
        shape: Outputs and inputs of a weight, by the shape of its first leaf; None where that does
            not tell.
        pack: The tensors of a weight by their leaf; None where the layout is only read.
        unpack: Its inverse; CheckpointError where the tensors cannot be expressed as one. None
            where the layout's values lie on no integer grid.
        zero_word: Every word of `qzeros` where the weight is symmetric; None without zero points.
        values: The weight in fp32 [N, K], where tensors may hold more than `unpack` expresses.
        refusal: What was found, where no scheme here holds the weights: `unpack` is None then.
        instead: What to convert a folder to that could be run as it is but is not, as `ptq convert
            --to` names it.
        inputs: The leaf that has the static scale of the layer's inputs; None where they have none.
    """

    name: str
    leaves: tuple[str, ...]
    marker: str
    shape: Callable[[Shape], Shape] | None = None
    pack: Callable[[StoredWeight], dict[str, Tensor]] | None = None
    unpack: Callable[[Mapping[str, Tensor]], StoredWeight] | None = None
    zero_word: int | None = None
    values: Callable[[Mapping[str, Tensor]], Tensor] | None = None
    refusal: str = ""
    instead: str | None = None
    inputs: str | None = None


@contextmanager
def named(name: str) -> Iterator[None]:
    """Put a name, of a layer or of a key, before the errors about it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error


def require_key(config: Mapping[str, Any], key: str, allowed: Iterable[Any], advice: str) -> Any:
    """The value of a key of the settings; absent counts as None.

    Raises:
        CheckpointError: the value is none of those allowed, type included; `advice` says what to
            do.
    """
    found, allowed = config.get(key), tuple(allowed)
    if not any(found == value and type(found) is type(value) for value in allowed):
        names = ", ".join("absent" if value is None else repr(value) for value in allowed)
        shown = "absent" if found is None else repr(found)
        raise CheckpointError(f"found {key} {shown}; allowed: {names}. {advice}")
    return found


def require_table(config: Mapping[str, Any], key: str, advice: str) -> Mapping[str, Any]:
    """The object under a key of the settings; absent counts as empty.

    Raises:
        CheckpointError: it is no object.
    """
    found = config.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise CheckpointError(f"found {key} {found!r}; needed is an object. {advice}")
    return found or {}


def read_size(config: Mapping[str, Any], key: str, run: Iterable[int], advice: str) -> int:
    """A group's inputs under a key of the settings: -1 for all, or any positive number.

    Raises:
        CheckpointError: it is none; `run` are those to recommend.
    """
    found = config.get(key)
    if type(found) is int and found > 0:
        return found
    return require_key(config, key, run, advice)


def require_tensor(
    tensors: Mapping[str, Tensor], leaf: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """A tensor of exactly a type and shape.

    Raises:
        CheckpointError: it is missing or another.
    """
    if leaf not in tensors:
        raise CheckpointError(f"{leaf} is missing; get the checkpoint again")
    tensor = tensors[leaf]
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{leaf} is {tensor.dtype} {tuple(tensor.shape)}; needed is {dtype} {shape}. Its "
            "quantization_config does not fit the tensors, or they are damaged"
        )
    return tensor


def packed_shape(tensors: Mapping[str, Tensor], leaf: str = "qweight") -> tuple[int, int]:
    """Rows and columns of a packed tensor."""
    if leaf not in tensors or tensors[leaf].dim() != 2:
        raise CheckpointError(f"{leaf} is missing or is no matrix; get the checkpoint again")
    rows, columns = tensors[leaf].shape
    return rows, columns


def runs(group_size: int) -> bool:
    """Whether kernels here take groups of a size: as they are, or as several of 128 each."""
    return group_size in RUN_SIZES or group_size % BLOCK == 0


def group_spec(bits: int, group_size: int, symmetric: bool) -> WeightSpec:
    """The specification of an integer weight in groups along its inputs; -1 for one group.

    Groups of several times 128 are as many of 128, with the same scale.
    """
    group_size = min(group_size, BLOCK)
    return WeightSpec(
        dtype="int4" if bits == 4 else "int8",
        granularity="per_channel" if group_size == -1 else "group",
        group_size=None if group_size == -1 else group_size,  # pyright: ignore[reportArgumentType]
        symmetric=symmetric,
    )


def check_divides(shape: tuple[int, ...], group_size: int, bits: int) -> None:
    """Refuse a weight [N, K] that words or groups do not fill.

    Raises:
        CheckpointError: N or K is no multiple of the values in a word, or K of the group.
    """
    count = 32 // bits
    group = count if group_size == -1 else group_size
    if shape[0] % count or shape[1] % count or shape[1] % group:
        raise CheckpointError(
            f"a weight {tuple(shape)} does not fill words of {count} values and groups of "
            f"{group_size}; needed are outputs divisible by {count} and inputs by both. Keep the "
            "compressed-tensors layout, or quantize with another group_size"
        )


def in_groups(weight: StoredWeight, group_size: int) -> StoredWeight:
    """A weight with scales and zero points repeated for groups of 128, where its are larger."""
    repeats = group_size // BLOCK
    if repeats <= 1:
        return weight
    zeros = weight.zero_point
    return replace(
        weight,
        scale=weight.scale.repeat_interleave(repeats, 1),
        zero_point=None if zeros is None else zeros.repeat_interleave(repeats, 1),
    )


def half_scales(weight: StoredWeight) -> Tensor:
    """Scales rounded to fp16, the type in which the layout stores them; [N, groups].

    The scale of a group of nothing but zeros is arbitrary; where it is too small for fp16, as ours
    may be, it is stored as 1.

    Raises:
        CheckpointError: a scale is too large or too small for fp16.
    """
    half = weight.scale.half()
    lost = ~torch.isfinite(half) | (half <= 0)
    half[lost & ~used_groups(weight)] = 1
    lost &= used_groups(weight)
    if bool(lost.any()):
        raise CheckpointError(
            f"scale {weight.scale[lost][0].item():.3g} cannot be held in fp16 (6e-8 to 65504), "
            "the type that this layout has. Keep the compressed-tensors layout"
        )
    return half


def used_groups(weight: StoredWeight) -> Tensor:
    """Whether a group along the inputs stands for anything but zeros; bool [N, groups]."""
    groups = weight.q.unflatten(1, (weight.scale.shape[1], -1))
    zeros = 0 if weight.zero_point is None else weight.zero_point.unsqueeze(-1)
    return (groups != zeros).any(dim=-1)


def without_signs(
    q: Tensor, scale: Tensor, zeros: Tensor, group: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A weight s (q - z) with positive scales only, the same number by number.

    Where s < 0 it is |s| (~q - ~z): the complement ~x = -x - 1 changes the sign of a difference,
    and stays within the bits of x, whatever x is.

    Args:
        q: int8 [N, K].
        scale: fp32 [N, groups].
        zeros: int8 [N, groups].
        group: int64 [K], the group of each input.
    """
    negative = scale < 0
    if not bool(negative.any()):
        return q, scale, zeros
    turned = negative.to(torch.int8).neg()  # all bits of those to be turned
    return q ^ turned[:, group], scale.abs(), zeros ^ turned
