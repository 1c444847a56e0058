"""The op table: every operation that the CPU's runtime is made of, its contract, and its choice.

An op is a plain function: no `torch.library` schema, no fake and no dispatcher. Nothing traces or
compiles the runtime, and its steps on a GPU are rows of fused kernels with arguments of their own
(`kernels.triton`), so a registration would serve its tests alone. Each op here has two
implementations: the compiled kernels of `kernels.cpu`, and plain torch (`kernels.reference`,
`kernels.reference_attention`), which is the specification that the compiled ones are tested
against and the fallback where there is no compiler.

**Row invariance.** A model's answer must not depend on what else is in the batch. On a given
machine, every op here returns a row (a token; a sequence in attention) with the same bits whatever
other rows share the call, and attention returns a query's row with the same bits whether it is in
a decode step, in a whole prefill or in any chunk of one.

Symbols: T tokens, H hidden size, K and N inputs and outputs of a linear layer, Hq and Hkv query and
key/value heads, D head size. Activations are fp32, bf16 or fp16.
"""

from __future__ import annotations

import torch
from torch import Tensor

import kernels.reference as reference
import kernels.reference_attention as reference_attention
import kernels.reference_attention as reference_latent
from kernels.cpu import native, native_attention, native_ops
from kernels.cpu.native_ops import LoraTable
from kernels.cpu.weights import Int8Weight, NativeWeight, Weight
from kernels.numerics import dequantize
from kernels.op_inputs import Activation, AttentionInputs, Clamped, KVPool


def _rows():
    """Where the ops on rows are."""
    return reference if native.library() is None else native_ops


def quantize_static(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize activations with one calibrated scale.

    Args:
        x: [T, K], float.
        scale: fp32, one element.

    Returns:
        int8 [T, K]: clamp(round_half_even(x / scale), -127, 127), with a true fp32 division.
    """
    return _rows().quantize_static(x, scale)


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row with a scale of its own, absmax / 127 (a tiny one for a row of zeros).

    Args:
        x: [T, K], float, finite.

    Returns:
        (int8 [T, K], fp32 scales [T, 1]).
    """
    return _rows().quantize_per_token(x)


def weight_rows(weight: Weight, ids: Tensor) -> Tensor:
    """Rows of a weight as floats: the embedding of tokens, where the head is the embedding, too.

    Args:
        weight: From `pack_quantized_weight` or `pack_float_weight`.
        ids: int64 [R].

    Returns:
        fp32 [R, K]: (q - zero point) * scale.
    """
    if isinstance(weight, NativeWeight):
        return native.rows(weight.packed, ids)
    own = weight.packed[ids].float()
    return own * weight.scale[ids, None] if isinstance(weight, Int8Weight) else own


def linear(
    x: Tensor,
    weight: Weight,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A linear layer: x W^T + bias.

    Args:
        x: Float [T, K], or int8 [T, K] in [-127, 127] with scales.
        weight: From `pack_quantized_weight` or `pack_float_weight`.
        x_scale: fp32, one element (static) or [T, 1] (per token), for int8 inputs.
        out_dtype: Element type of the result.

    Returns:
        [T, N]. Integer inputs: sums over the inputs that share a scale are exact integers; with
        one scale an output, acc * (x_scale * w_scale) + bias in fp32. Float inputs: fp32 sums;
        compiled kernels take them as int16 where integers have groups (`csrc/gemm_int.h`).
    """
    if isinstance(weight, NativeWeight):
        return native_ops.linear(x, weight.packed, x_scale).to(out_dtype)
    if isinstance(weight, Int8Weight):
        assert x_scale is not None
        return reference.int8_linear(
            x, x_scale, weight.packed, weight.scale, weight.bias, out_dtype
        )
    if x_scale is not None:
        x = dequantize(x, x_scale.reshape(-1, 1) if x_scale.numel() > 1 else x_scale.reshape(()))
    return reference.float_linear(x, weight.packed, weight.bias).to(out_dtype)


def fake_quantize_fp8(x: Tensor, scale: Tensor | None = None, group: int = -1) -> Tensor:
    """What an fp8 linear layer sees of its input: quantized to e4m3 and back.

    Args:
        x: [T, K], float.
        scale: fp32, one static element, or None where scales come from the data.
        group: Inputs of a row that share a dynamic scale, -1 for all; the last may be fewer.

    Returns:
        fp32 [T, K].
    """
    return _rows().fake_quantize_fp8(x, scale, group)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019, Eq. 4).

    Args:
        x: [..., H].
        weight: [H].
        eps: Added to the mean square.

    Returns:
        x / sqrt(mean(x^2) + eps) * weight in the type of `x`; the mean is taken in fp32.
    """
    return _rows().rms_norm(x, weight, eps)


def gated_product(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """The product activation(gate) * up of a gated MLP (Shazeer 2020, Eq. 6).

    Args:
        gate: [T, I].
        up: [T, I].
        activation: By its name.

    Returns:
        [T, I] in the type of `gate`, computed in fp32.
    """
    if isinstance(activation, Clamped):
        return reference.gated_product(gate, up, activation)
    return _rows().gated_product(gate, up, activation)


def add_lora(x: Tensor, y: Tensor, slots: Tensor, adapters: LoraTable, linear: int) -> Tensor:
    """What low-rank adapters add to a linear layer (Hu et al. 2021, arXiv 2106.09685, Eq. 3).

    Args:
        x: Float [T, K], what the layer reads.
        y: Float [T, N], what it gives.
        slots: int64 [T], the slot of each row's adapter; negative for none.
        adapters: Holds them.
        linear: The layer's number there.

    Returns:
        y + B (A x) of each row's adapter, [T, N] in the type of `y`; sums are fp32.
    """
    if native.library() is None:
        return reference.add_lora(x, y, slots, lambda slot: adapters.of(slot, linear))
    sums = y.to(torch.float32, copy=True).contiguous()
    adapters.add(x.float().contiguous(), sums, slots.contiguous(), linear)
    return sums.to(y.dtype)


def softcapped(x: Tensor, bound: float) -> Tensor:
    """c tanh(x / c) of numbers in fp32: those far below the bound c hardly change (Gemma 2)."""
    return _rows().softcapped(x, bound)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al. 2021) in the two-halves layout of Llama checkpoints.

    All channels of a head turn, as pairs (i, i + D / 2); where cos is 1 and sin 0, they do not.

    Args:
        q: [T, Hq, D].
        k: [T, Hkv, D].
        cos: [T, D] of each token's position, the two halves equal; D is even.
        sin: [T, D], laid out as `cos`.

    Returns:
        (q, k) rotated, new tensors.
    """
    return _rows().apply_rope(q, k, cos, sin)


def turn_heads(x: Tensor, size: int) -> Tensor:
    """Queries or keys turned by a Hadamard matrix, head by head, as a pool's `turn` says.

    Args:
        x: [T, heads, D], after RoPE.
        size: Channels that are turned together, a power of two that divides D.

    Returns:
        Of the shape and type of `x`: every run of `size` channels times H / sqrt(size).
    """
    return _rows().turn_heads(x, size)


def write_kv(
    k: Tensor, v: Tensor, pool: KVPool, slots: Tensor, positions: Tensor | None = None
) -> None:
    """Put the keys and values of new tokens into the paged cache, quantizing them.

    Keys come after RoPE, and turned where the pool says so (`turn_heads`). Static scales say how;
    where they are dynamic, each head of each token is scaled by its own absmax, and its scale is
    put where the pool has a place for it. Those of sink tokens are kept in float, too (`KVPool`).

    Args:
        k: [T, Hkv, D].
        v: [T, Hkv, Dv]; the sizes may differ.
        pool: Changed in place.
        slots: int64 [T], block * 64 + offset; no two alike.
        positions: int64 [T] of the tokens in their sequences; needed where the pool has sink
            tokens.
    """
    chosen = reference if native.library() is None else native_attention
    chosen.write_kv(k, v, pool, slots, positions)


def write_latent(
    latent: Tensor, keys: Tensor, pool: KVPool, slots: Tensor, positions: Tensor | None = None
) -> None:
    """Put what latent attention caches of new tokens into the paged cache, quantizing it.

    Args:
        latent: [T, R], after its norm.
        keys: [T, P], the part of the keys that is rotated, after RoPE.
        pool: For latents; changed in place.
        slots: int64 [T], block * 64 + offset; no two alike.
        positions: As in `write_kv`.
    """
    reference.write_kv(keys[:, None], latent[:, None], pool, slots, positions)


def latent_attention(q: Tensor, rotated: Tensor, inputs: AttentionInputs) -> Tensor:
    """Causal attention of new tokens over the cached latents c of their sequences.

    A head's logit of a token is `softmax_scale` (q c + rotated k), k the token's rotated key, and
    the result the sum of latents that these weigh (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Args:
        q: [T, Hq, R], queries times W^UK of their heads, the sequences' one after another.
        rotated: [T, Hq, P], the part of the queries that is rotated, after RoPE.
        inputs: What they see; its pool is one for latents.

    Returns:
        [T, Hq, R] in the type of `q`; W^UV makes values of it.
    """
    return reference_latent.latent_attention(q, rotated, inputs)


def heads_product(x: Tensor, weight: Tensor) -> Tensor:
    """Each head by a matrix of its own: float [T, H, n] times [H, n, m], in the type of `x`."""
    return reference_latent.heads_product(x, weight)


def paged_attention(q: Tensor, inputs: AttentionInputs) -> Tensor:
    """Causal attention of new tokens over their sequences' paged cache (Kwon et al. 2023).

    Args:
        q: [T, Hq, D], the sequences' queries one after another.
        inputs: What they see.

    Returns:
        [T, Hq, Dv] in the type of `q`.
    """
    chosen = reference_attention if native.library() is None else native_attention
    return chosen.paged_attention(q, inputs)
