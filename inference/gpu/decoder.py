"""A step of a decoder as a row of GPU kernels, from token ids to logits.

A block is nine launches: RMSNorm with the sum of the residual before it, q/k/v, rotation and the
write to the cache, attention, o, RMSNorm, gate and up, their product, down; where inputs are
quantized, the kernel before a linear layer ends in that (but o's, if scaled by its data: a tenth).
What a family norms before it is added is normed by the kernel that adds it; norms of q and k over
all of their heads are a launch of their own, as is a bound of the logits. Latent attention has
launches of its own (`attend_latents`). A mixture of experts has routing and a sum beside
(`inference.gpu.feed_forward`). Where `inference.gpu.fused` takes a block, all from its o, or
its rotation, to the next block's q/k/v is one launch.
Nothing is allocated but outputs and nothing waits for the device, so that a step can be captured as
a CUDA graph. On Hopper a kernel's programs start before the kernel ahead has ended
(`kernels.triton.common.overlap`): what says where tokens stand (`metadata_ready`) is read, and
weights are asked for, in that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from formats.families.family import LatentAttention
from inference.gpu.adapters import BlockAdapters, GpuAdapters, run_adapted
from inference.gpu.feed_forward import GpuExperts, feed_forward, inputs_of
from inference.gpu.fused import FusedLayers
from inference.gpu.layers import GpuLinear, as_wanted, workspace_on
from inference.gpu.ranks import Partial
from inference.models.config import ModelConfig
from inference.models.decoder import Decoder
from inference.models.parts import LatentProjections, Layer
from inference.proposers import HiddenStates
from inference.transformers_code.state_rows import Piece
from kernels.cuda.attention import Attention
from kernels.op_inputs import AttentionInputs, KVPool
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.invariant import invariant_attention
from kernels.triton.attention.latent import latent_attention
from kernels.triton.attention.latent_write import latent_write
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.attention.rope_cache import rope_write
from kernels.triton.common import has_e4m3
from kernels.triton.fused import add_rms_norm
from kernels.triton.linear.weight import InputFormat
from kernels.triton.norms import norm_projections
from kernels.triton.sampling.logits import softcap_logits

GpuDecoder = Decoder[GpuLinear, GpuExperts]


@dataclass(frozen=True)
class GpuBatch:
    """The tokens of one step, on the device.

    Attributes:
        ids: int64 [T].
        positions: int64 [T].
        slots: int64 [T], where K and V go in the cache; negative where they go nowhere.
        tables: int32 [S, W], pages of each sequence.
        lengths: int32 [S], tokens of each sequence in the cache after this step.
        rows: int64 [R], the tokens whose logits are wanted; None for all.
        query_start: int32 [S + 1], where a sequence's tokens begin; None where each has one.
        decodes: Sequences that have one token, first in the batch, where others have more.
        padded: Whether the step may be captured, and nothing asked of the host.
        invariant: Whether a token's bits are the same in any step; each is a sequence then.
        reads: Hidden states that a proposer reads; None where none does.
        adapters: int32 [T], slot of each token's adapter, -1 for none; None where none has one.
        loras: Holds them.
        pieces: Its tokens as modules that keep a state take them; none where no module does.
        fused: Runs what stands between two attentions in one kernel; None to run it by several.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    lengths: Tensor
    rows: Tensor | None = None
    query_start: Tensor | None = None
    decodes: int = 0
    padded: bool = False
    invariant: bool = False
    reads: HiddenStates | None = None
    adapters: Tensor | None = None
    loras: GpuAdapters | None = None
    pieces: Sequence[Piece] = ()
    fused: FusedLayers | None = None

    def adapted(self, block: int) -> BlockAdapters | None:
        """The adapters of a block, if any token has one."""
        if self.loras is None or self.adapters is None:
            return None
        return self.loras.of(block, self.adapters, invariant=self.invariant)


@torch.no_grad()
def forward(model: GpuDecoder, pools: Sequence[KVPool], batch: GpuBatch) -> Tensor:
    """Run the tokens of a step; their K and V go into the cache.

    Returns:
        Logits fp32 [R, vocabulary].
    """
    return read_logits(model, *run_blocks(model, pools, batch))


def read_logits(model: GpuDecoder, rows: Tensor, scales: Tensor | None) -> Tensor:
    """Logits fp32 [R, vocabulary] of rows of `run_blocks`, and their scales."""
    logits, softcap = model.head.run(rows, scales, torch.float32), model.config.logits_softcap
    return logits if softcap is None else softcap_logits(logits, softcap)


@torch.no_grad()
def run_blocks(
    model: GpuDecoder, pools: Sequence[KVPool], batch: GpuBatch
) -> tuple[Tensor, Tensor | None]:
    """Run the tokens of a step up to the head; their K and V go into the cache.

    Returns:
        (the rows [R, H] of the tokens whose logits are wanted, as the head reads them, their
        scales or None); `read_logits` makes logits of them.
    """
    c, total = model.config, model.embed(batch.ids)
    if c.embedding_scale != 1:
        total = total * c.embedding_scale
    sinks = sinks_of(batch.positions, model.sink_tokens)
    delta: Tensor | Partial | None = None  # what the sub-layer before adds
    after = None  # and the norm of that
    taps = batch.reads.blocks if batch.reads is not None else ()
    hidden: dict[int, Tensor] = {}  # by block, what it reads
    fused, qkv = batch.fused, None  # of the block, where the kernel ahead has computed them
    for i, (layer, pool, window) in enumerate(zip(model.layers, pools, c.windows, strict=True)):
        project, own = layer.qkv, layer.feed_forward
        loras = batch.adapted(i)
        if qkv is None:
            before = layer.before_attention
            rows, scales, total = _norm(total, delta, after, before, c.eps, project.rows, sinks)
            qkv = run_adapted(project, "qkv", rows, scales, model.dtype, loras)
        if i in taps:
            hidden[i] = total
        if fused is not None and _is_plain(c, model.query_growth, layer):
            inputs = _attention_inputs(c, layer, batch, pool, window)
            norms, turn = (layer.q_norm, layer.k_norm), (layer.cos, layer.sin)
            own_attention = Attention(qkv, norms, turn, batch.positions, batch.slots, inputs)
            if fused.attends(i, own_attention, loras):
                total, qkv = fused.run(i, own_attention, None, total, c.eps, sinks)
                delta = after = None
                continue
        rows, scales = _attend(c, model.query_growth, layer, qkv, batch, pool, window, sinks)
        if fused is not None and fused.takes(i, rows, loras):
            total, qkv = fused.run(i, rows, scales, total, c.eps, sinks)
            delta = after = None
            continue
        qkv, delta = None, run_adapted(layer.o, "o", rows, scales, model.dtype, loras)
        after = layer.after_attention
        before, wanted = layer.before_feed_forward, inputs_of(own, model.dtype)
        rows, scales, total = _norm(total, delta, after, before, c.eps, wanted, sinks)
        delta = feed_forward(own, rows, scales, model.dtype, batch.padded, sinks, loras)
        after = layer.after_feed_forward
    head, every = model.head, len(model.layers) in taps  # then of all rows the sum is read
    if batch.rows is not None and not every:
        total = total[batch.rows]
        delta = None if delta is None else delta[batch.rows]
    rows, scales, total = _norm(total, delta, after, model.norm, c.eps, head.rows)
    if batch.reads is not None:
        hidden[len(model.layers)] = total
        read = torch.stack([hidden[tap].to(batch.reads.dtype) for tap in taps], dim=1)
        batch.reads.keep(read, batch.slots)
    if batch.rows is not None and every:
        rows = rows[batch.rows]
        scales = scales_of_rows(scales, batch.rows)
    return rows, scales


def scales_of_rows(scales: Tensor | None, rows: Tensor) -> Tensor | None:
    """Scales of some rows; one scale of all rows, or None, as it is."""
    return scales if scales is None or scales.numel() == 1 else scales[rows]


def sinks_of(positions: Tensor, count: int) -> Tensor | None:
    """Which tokens are at the first `count` positions: int32 [T], 1 for these; None for count 0."""
    return (positions < count).to(torch.int32) if count else None


def _norm(
    total: Tensor,
    delta: Tensor | Partial | None,
    after: Tensor | None,
    before: Tensor | None,
    eps: float,
    wanted: InputFormat,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The sum of the residual stream and what a sub-layer adds, and its norm.

    Args:
        total: The residual stream, [T, H].
        delta: What is added, or this rank's part of it; None at the start.
        after: The weight of the norm of that, if there is one.
        before: The weight of the norm of what the next layer reads, if there is one.
        eps: Added to mean squares.
        wanted: How that layer wants its rows.
        sinks: int32 [T], 1 for the rows of sink tokens; None where none is.

    Returns:
        (rows, their scales, the sum).
    """
    scale, by = wanted.scales_of(sinks)
    if isinstance(delta, Partial) and by is not None:  # which the sum over ranks does not know
        rows, _, total = delta.add_rms_norm(total, before, eps, InputFormat(total.dtype), after)
        return *as_wanted(rows, wanted, by), total
    if isinstance(delta, Partial):
        return delta.add_rms_norm(total, before, eps, wanted, after)
    x, residual = (total, None) if delta is None else (delta, total)
    rest = (scale, wanted.dtype, wanted.group)
    about = {"residual_ready": True, "after": after, "experts": by, "length": wanted.length}
    return add_rms_norm(x, residual, before, eps, *rest, **about)


@torch.no_grad()
def run_block(
    config: ModelConfig,
    dtype: torch.dtype,
    layer: Layer[GpuLinear, GpuExperts],
    read: Tensor,
    x: Tensor,
    batch: GpuBatch,
    pool: KVPool,
    window: int | None,
) -> Tensor:
    """A decoder block by itself: [T, H] to the same.

    Args:
        read: What its attention reads, [T, inputs of q, k and v].
        x: What it adds to, [T, H].
        window: Positions that a query sees, or None for all.
    """
    qkv, own = layer.qkv(read, dtype=dtype), layer.feed_forward
    rows, scales = _attend(config, None, layer, qkv, batch, pool, window)
    delta = layer.o.run(rows, scales, dtype)
    before, wanted = layer.before_feed_forward, inputs_of(own, dtype)
    rows, scales, total = _norm(x, delta, layer.after_attention, before, config.eps, wanted)
    delta = feed_forward(own, rows, scales, dtype, batch.padded)
    after = layer.after_feed_forward
    return _norm(total, delta, after, None, config.eps, InputFormat(dtype))[2]


def _attend(
    c: ModelConfig,
    growth: Tensor | None,
    layer: Layer[GpuLinear, GpuExperts],
    qkv: Tensor,
    batch: GpuBatch,
    pool: KVPool,
    window: int | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention: [T, (Hq + 2 Hkv) D] to rows as the o layer wants them, and their scales."""
    q_norm, k_norm = layer.q_norm, layer.k_norm
    inputs = _attention_inputs(c, layer, batch, pool, window)
    if layer.latent is not None:
        turn, places = (layer.cos, layer.sin), (batch.positions, batch.slots)
        heads = attend_latents(c, layer.latent, qkv, turn, places, inputs, batch.decodes, sinks)
        return as_wanted(heads, layer.o.rows, sinks)
    if c.qk_norm == "projection" and q_norm is not None and k_norm is not None:
        qkv, q_norm, k_norm = norm_projections(qkv, q_norm, k_norm, c.eps), None, None
    heads = qkv.unflatten(1, (-1, c.head_dim))
    q, k, v = heads.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
    q = rope_write(
        q, k, v, layer.cos, layer.sin, pool, batch.slots, batch.positions, q_norm=q_norm,
        k_norm=k_norm, eps=c.eps, growth=growth, metadata_ready=True,
    )  # fmt: skip
    wanted = layer.o.rows
    fused: dict[str, Any] = {}
    one_scale = wanted.scale is not None and wanted.scales_of(sinks)[1] is None
    whole = wanted.length is None  # attention fills nothing up
    if whole and one_scale and (wanted.dtype == torch.int8 or has_e4m3(q.device)):
        fused = {"out_scale": wanted.scale, "out_dtype": wanted.dtype}
    starts, workspace = batch.query_start, workspace_on(q.device)
    if batch.invariant:
        y = invariant_attention(q, inputs, workspace, metadata_ready=starts is None, **fused)
    elif starts is None:
        y = decode_attention(q, inputs, workspace, metadata_ready=True, **fused)
    else:
        y = prefill_attention(q, inputs, workspace, batch.decodes, **fused)
    return (y.flatten(1), wanted.scale) if fused else as_wanted(y.flatten(1), wanted, sinks)


def _attention_inputs(
    c: ModelConfig,
    layer: Layer[GpuLinear, GpuExperts],
    batch: GpuBatch,
    pool: KVPool,
    window: int | None,
) -> AttentionInputs:
    return AttentionInputs(
        pool,
        batch.tables,
        batch.lengths,
        batch.query_start,
        c.scale,
        window,
        c.softcap,
        layer.sinks,
    )


def _is_plain(c: ModelConfig, growth: Tensor | None, layer: Layer[GpuLinear, GpuExperts]) -> bool:
    """Whether q and k are normed by heads, if at all, and rotated, and nothing else."""
    return layer.latent is None and growth is None and c.qk_norm != "projection"


def attend_latents(
    config: ModelConfig,
    own: LatentProjections[GpuLinear],
    read: Tensor,
    turn: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor],
    inputs: AttentionInputs,
    decodes: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """What the heads of latent attention give: what is between the layer that reads attention's
    input and the o layer.

    Two launches more than other attention: each head's queries are multiplied by W^UK before, and
    what attention gives by W^UV after it (`inference.models.parts`), as batched products of cuBLAS.
    Queries of two projections have a norm and a layer besides.

    Args:
        config: The decoder's.
        own: Its projections in a block.
        read: What the layer gives that reads the attention's input [T, n].
        turn: cos and sin of all positions, fp32 [positions, rotated].
        places: The tokens' positions, and where they go in the cache, int64 [T] both.
        inputs: What the queries see.
        decodes: Sequences that have one token, first in the batch, where others have more.
        sinks: int32 [T], 1 for the rows of sink tokens; None where none is.

    Returns:
        [T, heads * value] in the type of `read`.
    """
    sizes, names = config.latent, config.family.attention
    assert sizes is not None
    assert isinstance(names, LatentAttention)
    start = read.shape[1] - sizes.rank - sizes.rotated
    q, cached = read[:, :start], read[:, start:]
    if own.q_b is not None and own.q_norm is not None:
        wanted = own.q_b.rows
        scale, by = wanted.scales_of(sinks)
        rest = (scale, wanted.dtype, wanted.group)
        rows, scales, _ = add_rms_norm(
            q.contiguous(), None, own.q_norm, names.norm_eps, *rest, experts=by
        )
        q = own.q_b.run(rows, scales, read.dtype)
    heads = q.unflatten(1, (sizes.heads, -1))
    positions, slots = places
    rotated = latent_write(
        heads, cached, own.kv_norm, names.norm_eps, *turn, positions, inputs.pool, slots
    )
    absorbed = torch.bmm(heads[..., : sizes.plain].transpose(0, 1), own.up_k).transpose(0, 1)
    latents = latent_attention(absorbed, rotated, inputs, workspace_on(read.device), decodes)
    values = latents.new_empty(len(read), sizes.heads, sizes.value)
    torch.bmm(latents.transpose(0, 1), own.up_v, out=values.transpose(0, 1))
    return values.flatten(1)
