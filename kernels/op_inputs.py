"""What ops take beside plain tensors, on every device: attention's inputs, activations, gates.

Attention over the paged cache is given more than its queries. Its symbols: S sequences, M blocks of
the longest of them, Hkv key/value heads, D head size. Gated feed-forward layers name their
activations, and norms their gates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


KV_BLOCK = 64  # tokens of one block of the paged cache


@dataclass(frozen=True)
class KVPool:
    """The paged cache of one layer (Kwon et al. 2023); its tensors change in place.

    Attributes:
        k: [blocks, Hkv, 64, D], int8 or e4m3 with scales, float without. uint8 is int4, two numbers
            a byte, [blocks, Hkv, 64, D / 2]; see `kernels.packed_cache`.
        v: As `k`, its heads of a size, and beside int8 keys perhaps of a type, of their own; for
            the GPU's kernels [blocks, Hkv, D, 64]. A pool for latents has the rotated part of the
            keys as `k`, [blocks, 1, 64, P], and the latents as `v`, [blocks, 1, 64, R] everywhere.
        k_scale: Static: fp32 [Hkv], or [Hkv, D] with a scale for each channel. Dynamic: one for
            each head of each cached token, [blocks, Hkv, 64], fp16 on a GPU and where K or V is
            int4, else fp32; that of int4 may be negative. None without quantization.
        v_scale: Static: fp32 [Hkv], for latents [1, R] and `k_scale` [1, P]; dynamic and without
            quantization as `k_scale`.
        dynamic: Whether a token's scales are taken from its K and V when they are written.
        turn: Channels that are turned together in K, which is turned before it is written, as are
            its queries (`kernels.packed_cache.turned`); 0 where K is as RoPE gives it.
        k_offset: fp32 [Hkv, D], subtracted from K, after its turn, before it is quantized; or None.
            It stands in every key of a head, so that a query's products with them all shrink by one
            number, which the softmax does not see (Zhang et al., "SageAttention", arXiv 2410.02367,
            section 4.2); never there beside a softcap or sinks, which would.
        k_feedback: fp32 [Hkv, D, D] of int4 keys with dynamic scales that are rounded with feedback
            (`kernels.packed_cache.compensated`); or None.
        sink_k: Keys of sink tokens, which are not quantized: [blocks, Hkv, n, D] floats of the
            tokens at the first n positions of a sequence, n at most 16, by the number of its first
            block. They are turned, and less `k_offset`, as all keys are. None where there are none.
            What `k` holds of these tokens is not read.
        sink_v: Their values, likewise [blocks, Hkv, n, Dv]; of latents the two are what `k` and
            `v` stand for.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    dynamic: bool = False
    turn: int = 0
    k_offset: Tensor | None = None
    k_feedback: Tensor | None = None
    sink_k: Tensor | None = None
    sink_v: Tensor | None = None

    @property
    def sink_tokens(self) -> int:
        """Tokens at the beginning of a sequence whose K and V are not quantized."""
        return 0 if self.sink_k is None else self.sink_k.shape[2]

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

    def __post_init__(self) -> None:
        """Refuse keys that are centred where a shift of all logits would be seen."""
        if self.pool.k_offset is not None and (self.softcap is not None or self.sinks is not None):
            raise ValueError("keys are centred, which attention with a softcap or sinks would see")

    @property
    def changes_logits(self) -> bool:
        """Whether the softmax is of more than scaled products and what is not seen."""
        return any(change is not None for change in (self.softcap, self.sinks, self.alibi))


@dataclass(frozen=True)
class Clamped:
    """min(g, c) sigmoid(a min(g, c)) (clip(u, -c, c) + 1) of gate g and up u (gpt-oss).

    Attributes:
        slope: a.
        bound: c.
    """

    slope: float
    bound: float


@dataclass(frozen=True)
class Gate:
    """How a norm of rows x has a gate g of their shape: norm(x) f(g), or norm(x f(g)).

    Attributes:
        silu: f is silu, else the sigmoid.
        first: norm(x f(g)).
        groups: Into how many equal parts, each normed by itself, a row is cut.
    """

    silu: bool = True
    first: bool = False
    groups: int = 1


Named = Literal["silu", "gelu_tanh", "gelu"]
Activation = Named | Clamped
"""x sigmoid(x); x Phi(x) with the normal distribution Phi by its approximation by tanh, or exactly
(Hendrycks and Gimpel 2016, arXiv 1606.08415); or one that changes the factor beside it too."""
