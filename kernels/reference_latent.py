"""Attention over cached latents in plain torch (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).

Scores are q^C_h W_h^UK c_t + q^R_h k^R_t. With the product q^C_h W_h^UK in the place of the query,
all heads attend to one "key" [c_t, k^R_t] of a token and one "value" c_t, and W_h^UV is multiplied
with what comes out: grouped-query attention with a single KV head, of which V is a part of K. That
is how it is computed here, by `kernels.reference_attention` and with its promises.

The cache's integers are multiplied as they are: scales of the latent's channels and of the rotated
key are folded into the queries, those of the latent into the output.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.attention_inputs import AttentionInputs, KVPool
from kernels.reference import product
from kernels.reference_attention import paged_attention


def latent_attention(q: Tensor, rotated: Tensor, inputs: AttentionInputs) -> Tensor:
    """See `kernels.ops.latent_attention`."""
    pool, scale = inputs.pool, inputs.pool.v_scale
    assert not pool.dynamic  # refused where the cache is made
    wide = [x.float() for x in (q, rotated)]
    if scale is not None and pool.k_scale is not None:
        wide = [x * own.flatten() for x, own in zip(wide, (scale, pool.k_scale), strict=True)]
    blocks = inputs.block_tables.flatten()
    table = torch.arange(len(blocks)).view_as(inputs.block_tables)
    latents, keys = pool.v[blocks], pool.k[blocks]
    own_k = own_v = None
    if pool.sink_k is not None and pool.sink_v is not None:
        own_k, own_v = pool.sink_k[blocks].float(), pool.sink_v[blocks].float()
        if scale is not None and pool.k_scale is not None:  # in units of what is read
            own_k, own_v = own_k / pool.k_scale.flatten(), own_v / scale.flatten()
        own_k = torch.cat((own_v, own_k), -1)
    seen = KVPool(
        torch.cat((_bytes(latents), _bytes(keys)), -1).view(pool.k.dtype),
        latents,
        sink_k=own_k,
        sink_v=own_v,
    )
    out = paged_attention(torch.cat(wide, -1), replace(inputs, pool=seen, block_tables=table))
    return (out if scale is None else out * scale.flatten()).to(q.dtype)


def _bytes(x: Tensor) -> Tensor:
    """e4m3 as bytes: what moves tensors takes no such numbers."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def heads_product(x: Tensor, weight: Tensor) -> Tensor:
    """Each head by its own matrix: [T, H, n] times [H, n, m], in the type of `x`."""
    return product(x.transpose(0, 1).to(weight.dtype), weight).transpose(0, 1).to(x.dtype)
