"""The order of the channels of q and k in which they run, folded into tensors where they are read.

Rotation turns pairs of channels i and i + D / 2 of a whole head (`formats.modeling.rotary`). Heads
that are stored otherwise - pairs side by side, turning channels before those that do not - have
their channels put in that order: the rows of q and k with their scales, zero points and biases, the
weights of norms over heads or whole projections, and the scales of K's channels in the cache. q and
k have one order, so that their products do not change; V and what reads it stay as they are.
Nothing that runs them has to know of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inference.models.read import StoredLinear

Channels = tuple[int, ...] | None


def held_heads(stored: StoredLinear, heads: int, channels: Channels) -> StoredLinear:
    """A layer that makes q, k and v with the channels of q and k in the order in which they run.

    Args:
        stored: q, k and v merged: [(Hq + 2 Hkv) D, K].
        heads: Hq + Hkv.
        channels: Places of the channels as they are stored; None where nothing moves.
    """
    if channels is None:
        return stored
    rows = torch.arange(len(stored.weight), device=stored.weight.device)
    turning = rows[: heads * len(channels)].view(heads, -1)
    turning.copy_(turning[:, channels])
    return with_rows(stored, rows)


def with_rows(stored: StoredLinear, rows: Tensor | Sequence[int]) -> StoredLinear:
    """A layer with its outputs in another order: the places they have as they are stored."""
    index = torch.as_tensor(rows, device=stored.weight.device)
    if bool((index == torch.arange(len(index), device=index.device)).all()):
        return stored
    taken = (stored.weight, stored.scale, stored.zero_point, stored.bias)
    weight, scale, zero_point, bias = (None if t is None else _rows(t, index) for t in taken)
    assert weight is not None
    return replace(stored, weight=weight, scale=scale, zero_point=zero_point, bias=bias)


def held_rows(rows: Tensor, channels: Channels) -> Tensor:
    """Rows [heads D, ...] of q or k, or of the weight of a norm of one head or of all, in the same
    order."""
    if channels is None:
        return rows
    return rows.unflatten(0, (-1, len(channels)))[:, channels].flatten(0, 1)


def held_scales(
    pair: tuple[Tensor, Tensor] | None, channels: Channels
) -> tuple[Tensor, Tensor] | None:
    """Static scales of K and V: those of K's channels [Hkv, D], if it has any, in that order."""
    if pair is None or channels is None or pair[0].dim() < 2:
        return pair
    return pair[0][:, channels], pair[1]


def with_divided_input(stored: StoredLinear, divisor: float) -> StoredLinear:
    """A layer whose input comes divided by a number, which a static scale of it has to be too."""
    if stored.input_scale is None or divisor == 1:
        return stored
    sinks = None if stored.sink_scale is None else stored.sink_scale / divisor
    return replace(stored, input_scale=stored.input_scale / divisor, sink_scale=sinks)


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor of any type; e4m3 is moved as bytes."""
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8)[rows].view(tensor.dtype)
    return tensor[rows]
