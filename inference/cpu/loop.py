"""The engine's steps where tokens are chosen on the host; `inference.gpu.loop` is its twin.

A step is one call of the compiled kernels (`fuse`), or op by op; of transformers' code `CodeStep`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from inference.cpu.batch import Batch, plan_step
from inference.cpu.decoder import CpuDecoder, CpuLayer
from inference.cpu.layers import CpuExperts, Linear
from inference.models.adapters import (
    ADAPTED,
    AdaptedLayer,
    AdapterPart,
    AdapterParts,
    AdapterStore,
    linear_of,
    number_of,
    outputs_of,
)
from inference.models.decoder import Decoder
from inference.models.layers import GatedMLP
from inference.requests.request import StepResult
from inference.scheduling.acceptance import Acceptance
from inference.scheduling.active import ActiveRequests
from inference.scheduling.work import Work
from inference.transformers_code.attention import Query, Step, widened
from kernels.cpu.decoder import BlockSpec, DecoderSpec, FusedDecoder, LinearSpec
from kernels.cpu.native_ops import LoraTable
from kernels.cpu.weights import NativeWeight
from kernels.op_inputs import Gate, KVPool, Named
from kernels.ops import apply_rope, gated_product, paged_attention, rms_norm, turn_heads, write_kv
from kernels.packed_cache import channels
from kernels.reference import LowRank, gated_norm


def fuse(model: CpuDecoder, pools: Sequence[KVPool]) -> Callable[[Batch], Tensor] | None:
    """Put a model and a cache together: what gives the logits of a batch.

    Returns:
        None where a part has no fused kernel: mixtures of experts, other types than fp32, weights
        that are not packed for the compiled kernels, inputs in another order (act-order), latent
        attention.
    """
    config = model.config
    parts = [_block(*triple) for triple in zip(model.layers, pools, config.windows, strict=True)]
    head = _linear(model.head)
    blocks = [part for part in parts if part is not None]
    if model.dtype != torch.float32 or head is None or len(blocks) < len(parts):
        return None
    fused = FusedDecoder(
        DecoderSpec(
            embedding=model.embedding,
            blocks=blocks,
            norm=model.norm,
            head=head,
            heads=config.heads,
            eps=config.eps,
            scale=config.scale,
            activation=config.activation,
            embedding_scale=config.embedding_scale,
            growth=model.query_growth,
            softcap=config.softcap,
            logits_softcap=config.logits_softcap,
            sink_tokens=max([model.sink_tokens, *(pool.sink_tokens for pool in pools)]),
        )
    )
    return lambda batch: fused.step(**vars(batch))


def _linear(linear: Linear) -> LinearSpec | None:
    if not isinstance(linear.weight, NativeWeight) or linear.order is not None:
        return None
    packed, spec = linear.weight.packed, linear.activations
    if spec is None:
        return LinearSpec(packed)
    inputs = cast(Literal["int8", "fp8_e4m3"], spec.dtype)
    return LinearSpec(packed, inputs, linear.input_scale, spec.group, linear.sink_scale)


def _block(layer: CpuLayer, pool: KVPool, window: int | None) -> BlockSpec | None:
    own = layer.feed_forward
    if not isinstance(own, GatedMLP) or layer.latent is not None:
        return None
    linears = (layer.qkv, layer.o, own.gate_up, own.down)
    specs = [spec for spec in map(_linear, linears) if spec is not None]
    if len(specs) < len(linears):
        return None
    qkv, o, gate_up, down = specs
    return BlockSpec(
        cos=layer.cos,
        sin=layer.sin,
        before_attention=layer.before_attention,
        qkv=qkv,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        sinks=layer.sinks,
        o=o,
        after_attention=layer.after_attention,
        before_feed_forward=layer.before_feed_forward,
        gate_up=gate_up,
        down=down,
        after_feed_forward=layer.after_feed_forward,
        pool=pool,
        window=window,
    )


class CodeStep(Step):
    """The tokens of a step and the cache."""

    _batch: Batch

    @override
    def sinks(self, count: int) -> Tensor | None:
        return self._batch.sinks(count)

    @override
    def keep_output(self, x: Tensor) -> None:
        if self._batch.hidden is not None:
            self._batch.hidden[:, 0] = x

    @override
    def attend(self, layer: int, own: Query) -> Tensor:
        pool, batch, size = self._pools[layer], self._batch, own.v.shape[2]
        wide, wide_v = channels(pool.k), channels(pool.v)
        q, k = widened(own.q, wide), widened(own.k, wide)
        if pool.turn:
            q, k = turn_heads(q, pool.turn), turn_heads(k, pool.turn)
        write_kv(k, widened(own.v, wide_v), pool, batch.slots, batch.positions)
        where = (batch.block_tables, batch.context_len, batch.query_start)
        inputs = own.inputs(pool, *where, self._windows[layer])
        return paged_attention(q, inputs)[..., :size]

    @override
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    @override
    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, form: Gate) -> Tensor:
        return gated_norm(x, gate, weight, eps, form)

    @override
    def gated_product(self, gate_up: Tensor, activation: Named) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gated_product(gate, up, activation)

    @override
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned = cos.shape[1]
        if turned == q.shape[2]:
            return apply_rope(q, k, cos, sin)
        parts = apply_rope(q[..., :turned], k[..., :turned], cos, sin)
        q, k = (torch.cat((own, x[..., turned:]), -1) for own, x in zip(parts, (q, k), strict=True))
        return q, k


class CpuAdapters:
    """Holds adapters; see `inference.models.adapters.AdapterStore`.

    Args:
        model: The decoder that they are of.

    Attributes:
        table: The layers of `ADAPTED` of one block after another.
    """

    def __init__(self, model: Decoder[Linear, CpuExperts]) -> None:
        self._model = model
        self.table = LoraTable(len(model.layers) * len(ADAPTED))

    def put(self, slot: int, parts: AdapterParts) -> None:
        """Hold an adapter in a slot: in bf16 beside weights that are quantized."""
        layers = {
            number_of(block, layer): [self._laid_out(block, layer, part) for part in own]
            for (block, layer), own in parts.items()
        }
        self.table.put(slot, layers)

    def with_slots(self, batch: Batch, slots: Tensor) -> Batch:
        """A step whose tokens run with the adapters in `slots`, int64 [T]."""
        return replace(batch, adapters=slots, loras=self.table)

    def _laid_out(self, block: int, layer: AdaptedLayer, part: AdapterPart) -> LowRank:
        outputs = outputs_of(self._model.config, layer, len(part.b))
        first = sum(outputs[: part.index])
        return LowRank.of(part.a, part.b, first, self._dtype(block, layer))

    def _dtype(self, block: int, layer: AdaptedLayer) -> torch.dtype:
        quantized = linear_of(self._model.layers[block], layer).quantized
        return torch.bfloat16 if quantized else torch.float32


class HostLoop:
    """Steps of an engine: each is computed, and its tokens are returned, before the next.

    Args:
        forward: Runs the tokens of a step: logits fp32 [R, vocabulary] of the rows wanted.
        requests: Those that live, and what schedules them.
        adapters: Makes what holds the adapters that requests run with.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        requests: ActiveRequests,
        adapters: Callable[[], CpuAdapters],
    ) -> None:
        self.forward, self._scheduler, self._requests = forward, requests.scheduler, requests
        self._acceptance, self._make_adapters = Acceptance(requests), adapters
        self._adapters: CpuAdapters | None = None

    def adapters(self) -> AdapterStore:
        """What holds the adapters that requests run with.

        Raises:
            EngineError: none are run with this model.
        """
        if self._adapters is None:
            self._adapters = self._make_adapters()
        return self._adapters

    def step(self) -> StepResult:
        """Run a step and tell its tokens."""
        start = time.perf_counter()
        work = self._scheduler.schedule()
        if not len(work):
            return StepResult()
        self._requests.prepare_cache()
        logits = self._computed(work)
        self._scheduler.advance(work)
        which = np.flatnonzero(work.rows)
        result = StepResult()
        if len(which):
            result = self._acceptance.take_logits(work, which, logits)
        self._scheduler.note_time(work, time.perf_counter() - start)
        return result

    def _computed(self, work: Work) -> Tensor:
        """Logits of a step, whose hidden states go to who drafts, if it reads any."""
        batch, drafter = self._planned(work), self._scheduler.drafter
        wanted = None if drafter is None else drafter.proposer.reads
        if drafter is None or wanted is None:
            return self.forward(batch)
        hidden = torch.empty(work.tokens, len(wanted.blocks), wanted.size, dtype=wanted.dtype)
        logits = self.forward(replace(batch, taps=torch.tensor(wanted.blocks), hidden=hidden))
        wanted.keep(hidden, batch.slots)
        drafter.proposer.note_hidden(work)
        return logits

    def score(self, work: Work) -> Tensor:
        """Logits of the tokens of a sequence that is run apart, fp32 [tokens, vocabulary]."""
        return self.forward(self._planned(work))

    def _planned(self, work: Work) -> Batch:
        """The tensors of a step."""
        batch = plan_step(work)
        if self._adapters is None or not work.adapted:
            return batch
        return self._adapters.with_slots(batch, torch.from_numpy(work.adapters.astype(np.int64)))

    def warm_up(self) -> None:
        """Nothing is compiled when it is needed."""

    def settle(self) -> StepResult:
        """Nothing: no step is on its way between two."""
        return StepResult()

    def drop(self) -> None:
        """No step is on its way between two."""
