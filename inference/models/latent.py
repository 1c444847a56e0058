"""The projections of latent attention, read and laid out for absorbed products.

DeepSeek-V2 (arXiv 2405.04434, section 2.1.2): the projection from the latent to keys is multiplied
with queries, that to values with what attention gives, so that attention sees latents alone. They
are held as floats, whatever they are stored as: [heads, channels, R] products take no scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Generic

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.families.family import LatentAttention
from formats.families.sizes import LatentSizes
from inference.models.channel_order import Channels, with_rows
from inference.models.layers import L, LayerFactory, X
from inference.models.read import StoredLinear, finite, read_linear
from kernels.numerics import dequantize


@dataclass(frozen=True)
class LatentProjections(Generic[L]):
    """What stands between the layers that read attention's input and the cache, and after it.

    Attributes:
        q_norm: Weight of the norm of the queries' latent [Rq]; None where q is one projection.
        q_b: Makes queries [heads (plain + rotated)] of it, or None.
        kv_norm: Weight of the latent's norm [R].
        up_k: W^UK of each head: [heads, plain, R].
        up_v: W^UV of each head, transposed: [heads, R, value].
    """

    q_norm: Tensor | None
    q_b: L | None
    kv_norm: Tensor
    up_k: Tensor
    up_v: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of its linear layers."""
        own = self.up_k.nbytes + self.up_v.nbytes
        return own if self.q_b is None else own + self.q_b.nbytes


def load_latent(
    checkpoint: Checkpoint,
    attention: str,
    names: LatentAttention,
    sizes: LatentSizes,
    channels: Channels,
    factory: LayerFactory[L, X],
) -> tuple[L, LatentProjections[L]]:
    """Read the projections of an attention module.

    Args:
        attention: Full name of the module.
        channels: Places of the rotated channels as they are stored, in the order in which they run.

    Returns:
        The layer of all that reads the attention's input (q, or its latent, then the latent of keys
        and values and the rotated key), and the rest.

    Raises:
        CheckpointError: a tensor is missing or damaged.
    """

    def vector(name: str) -> Tensor:
        own = finite(checkpoint, f"{attention}.{name}.weight")
        return own.to(factory.device, factory.dtype)

    read = partial(read_linear, checkpoint, device=factory.device)
    split = sizes.query_rank is not None
    inputs = read([f"{attention}.{name}" for name in (names.q_a if split else names.q, names.kv_a)])
    turned, start = list(range(sizes.query_rank or 0)), sizes.query_rank or 0
    queries = _query_rows(sizes, channels)
    if not split:
        turned, start = list(queries), len(queries)
    order = channels or tuple(range(sizes.rotated))
    turned += [start + i for i in (*range(sizes.rank), *(sizes.rank + c for c in order))]
    up = dequantized(read([f"{attention}.{names.kv_b}"])).to(factory.dtype)
    up_k, up_v = up.view(sizes.heads, -1, sizes.rank).split([sizes.plain, sizes.value], dim=1)
    q_b = None
    if split:
        q_b = factory.linear(with_rows(read([f"{attention}.{names.q_b}"]), queries))
    return factory.linear(with_rows(inputs, turned)), LatentProjections(
        q_norm=vector(names.q_norm) if split else None,
        q_b=q_b,
        kv_norm=vector(names.kv_norm),
        up_k=up_k.contiguous(),
        up_v=up_v.transpose(1, 2).contiguous(),
    )


def _query_rows(sizes: LatentSizes, channels: Channels) -> list[int]:
    """Rows of a projection to queries, so that what turns together is in two halves."""
    head = [*range(sizes.plain), *(sizes.plain + c for c in channels or range(sizes.rotated))]
    return [h * len(head) + row for h in range(sizes.heads) for row in head]


def dequantized(stored: StoredLinear) -> Tensor:
    """The floats that a layer multiplies: [N, K], its inputs in their own order."""
    weight = stored.weight
    if stored.scale is not None:
        block = (1, stored.group or -1)
        weight = dequantize(weight, stored.scale, stored.zero_point, block)
    if stored.order is None:
        return weight
    return torch.empty_like(weight).index_copy_(1, stored.order, weight)
