"""What attention over the paged cache is given beside its queries, on every device.

Symbols: S sequences, M blocks of the longest of them, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

KV_BLOCK = 64  # tokens of one block of the paged cache


@dataclass(frozen=True)
class KVPool:
    """The paged cache of one layer (Kwon et al. 2023); its tensors change in place.

    Attributes:
        k: [blocks, Hkv, 64, D], int8 or e4m3 with scales, float without.
        v: As `k`, its heads of a size of their own perhaps; for the GPU's kernels
            [blocks, Hkv, D, 64]. A pool for latents has the rotated part of the keys as `k`,
            [blocks, 1, 64, P], and the latents as `v`, [blocks, 1, 64, R] everywhere.
        k_scale: Static: fp32 [Hkv], or [Hkv, D] with a scale for each channel. Dynamic: one for
            each head of each cached token, [blocks, Hkv, 64], fp32 on a CPU and fp16 on a GPU.
            None without quantization.
        v_scale: Static: fp32 [Hkv], for latents [1, R] and `k_scale` [1, P]; dynamic and without
            quantization as `k_scale`.
        dynamic: Whether a token's scales are taken from its K and V when they are written.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    dynamic: bool = False

    @property
    def nbytes_per_token(self) -> int:
        """Bytes of one token's K and V, and of its scales where it has its own."""
        tensors = [self.k, self.v]
        tensors += [s for s in (self.k_scale, self.v_scale) if s is not None and self.dynamic]
        return sum(tensor[0].nbytes for tensor in tensors) // KV_BLOCK


@dataclass(frozen=True)
class AttentionInputs:
    """Which cached tokens each query of a step sees, and how.

    The keys and values of the step's own tokens are in the cache already. Query i of the n of
    sequence s stands at position context_len[s] - n + i; it sees its own and earlier positions, of
    which the last `sliding_window` where one is given.

    Attributes:
        pool: The layer's cache.
        block_tables: [S, M], the blocks of each sequence in order, int64 on a CPU and int32 on a
            GPU; entries beyond a context are not used, but are valid block numbers.
        context_len: [S], tokens of each sequence in the cache, those of this step included; of the
            same type.
        query_start: [S + 1], where each sequence's queries begin; of the same type. None where
            each sequence has one query.
        softmax_scale: Factor of q k^T, usually 1 / sqrt(D).
        sliding_window: Positions that a query sees, or None for all.
        softcap: Bound c of the logits, c tanh(x / c), before what is not seen is masked; or None.
        sinks: fp32 [Hq], a logit of each head that takes part in the softmax and has no value (its
            weight goes nowhere); or None.
        alibi: fp32 [Hq], slopes m of biases m (j - i) of query i's logit of key j (Press et al.
            2022, arXiv 2108.12409); or None.
    """

    pool: KVPool
    block_tables: Tensor
    context_len: Tensor
    query_start: Tensor | None
    softmax_scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether the softmax is of more than scaled products and what is not seen."""
        return any(change is not None for change in (self.softcap, self.sinks, self.alibi))
