"""One step of a whole decoder in one call of the compiled kernels; see `csrc/decoder.cpp`.

Weights, norms, tables and the cache stay where they are: what is made here once for a model is a
table of their addresses. The logits have the same bits as those of the ops called one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.cpu import native
from kernels.cpu.native_attention import check_pool, formats
from kernels.cpu.native_ops import LoraTable
from kernels.cpu.structures import ACTIVATIONS, FLOATS, FORMATS, fields, pointer
from kernels.op_inputs import Activation, KVPool
from kernels.packed_cache import channels

PACKED_ROWS = -1  # format of an embedding that is the rows of a packed weight
KINDS = {"float": 0, "int8": 1, "fp8_e4m3": 2}


class _Layer(Structure):
    _fields_ = [
        *fields(c_void_p, "weight scale sink_scale"),
        ("group", c_int64),
        *fields(c_int32, "kind unused"),
    ]


class _Block(Structure):
    _fields_ = [
        *fields(_Layer, "qkv o gate_up down"),
        *fields(c_void_p, "cos sin before_attention after_attention before_feed_forward"),
        *fields(c_void_p, "after_feed_forward q_norm k_norm sinks k_pool v_pool k_scale v_scale"),
        *fields(c_void_p, "k_offset k_feedback sink_k sink_v"),
        *fields(c_int64, "window cache_blocks turn"),
        *fields(c_int32, "k_format v_format k_scale_kind v_scale_kind whole_norms unused"),
    ]


class _Decoder(Structure):
    _fields_ = [
        *fields(c_void_p, "blocks embedding norm growth"),
        ("head", _Layer),
        *fields(c_int64, "layers hidden heads kv_heads dim intermediate vocabulary"),
        *fields(c_int32, "embedding_format activation"),
        *fields(c_float, "embedding_scale eps softmax_scale softcap logits_softcap"),
        ("sink_tokens", c_int32),
    ]


class _Step(Structure):
    _fields_ = [
        *fields(c_void_p, "ids positions slots block_tables query_start context_len rows"),
        *fields(c_int64, "tokens sequences table_stride wanted"),
        *fields(c_void_p, "logits workspace problem partials taps hidden"),
        ("tapped", c_int64),
        *fields(c_void_p, "adapters loras"),
    ]


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer of a decoder.

    Attributes:
        packed: From `native.pack`.
        inputs: How its input is quantized.
        scale: fp32, one static element, or None.
        sink_scale: That of sink tokens' rows, where they have one of their own.
        group: Inputs of a row that share a dynamic scale, -1 for all.
    """

    packed: Tensor
    inputs: Literal["float", "int8", "fp8_e4m3"] = "float"
    scale: Tensor | None = None
    group: int = -1
    sink_scale: Tensor | None = None


@dataclass(frozen=True)
class BlockSpec:
    """A decoder block and its cache; norms are fp32, and may be missing.

    Attributes:
        cos: fp32 [positions, D], the two halves equal.
        sin: fp32 [positions, D].
        before_attention: [hidden].
        qkv: q, k and v merged.
        q_norm: Of each head [D], or of the whole projection [Hq D].
        sinks: fp32 [Hq], as in `AttentionInputs`, or None.
        o: Attention's output projection.
        after_attention: [hidden].
        before_feed_forward: [hidden].
        gate_up: gate and up merged.
        down: The feed-forward layer's output projection.
        after_feed_forward: [hidden].
        window: Positions that a query sees, or None for all.
    """

    cos: Tensor
    sin: Tensor
    before_attention: Tensor | None
    qkv: LinearSpec
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    o: LinearSpec
    after_attention: Tensor | None
    before_feed_forward: Tensor | None
    gate_up: LinearSpec
    down: LinearSpec
    after_feed_forward: Tensor | None
    pool: KVPool
    window: int | None


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder.

    Attributes:
        embedding: [vocabulary, hidden], fp32 or bf16; None where it is the rows of the head.
        norm: fp32 [hidden].
        head: Gives the logits.
        heads: Query heads.
        scale: Factor of q k^T.
        embedding_scale: Factor of the embedding's rows.
        growth: fp32 [positions], factor of q at each, or None.
        softcap: Bound of attention's logits, or None.
        logits_softcap: Bound of the logits, or None.
        sink_tokens: Positions from the first on whose tokens have static scales of their own, and
            K and V that are not quantized where a pool has room for them.
    """

    embedding: Tensor | None
    blocks: Sequence[BlockSpec]
    norm: Tensor
    head: LinearSpec
    heads: int
    eps: float
    scale: float
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    growth: Tensor | None = None
    softcap: float | None = None
    logits_softcap: float | None = None
    sink_tokens: int = 0


class FusedDecoder:
    """Runs steps of a decoder, each in one call.

    Args:
        spec: Its tensors; they are kept, and may not move.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        self._spec = spec
        held = spec.blocks[0].pool.k
        kv_heads, dim = held.shape[1], channels(held)
        self._blocks = (_Block * len(spec.blocks))(*[self._block(b) for b in spec.blocks])
        head, table = native.header(spec.head.packed), spec.embedding
        self._vocabulary = head.outputs
        self._decoder = _Decoder(
            ctypes.addressof(self._blocks),
            *map(pointer, (spec.head.packed if table is None else table, spec.norm, spec.growth)),
            self._layer(spec.head),
            len(spec.blocks),
            head.inputs,
            spec.heads,
            kv_heads,
            dim,
            native.header(spec.blocks[0].down.packed).inputs,
            self._vocabulary,
            PACKED_ROWS if table is None else FORMATS[FLOATS[table.dtype]],
            ACTIVATIONS[spec.activation],
            spec.embedding_scale,
            spec.eps,
            spec.scale,
            spec.softcap or 0.0,
            spec.logits_softcap or 0.0,
            spec.sink_tokens,
        )
        self._workspace = native.aligned(0)

    def step(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        rows: Tensor,
        taps: Tensor | None = None,
        hidden: Tensor | None = None,
        adapters: Tensor | None = None,
        loras: LoraTable | None = None,
    ) -> Tensor:
        """Run the tokens of a step; further arguments as in `kernels.ops` and in batches.

        Args:
            taps: int64 [n], blocks whose inputs are wanted; the number of blocks stands for the
                output of the last one.
            hidden: fp32 [T, n, hidden], gets them.
            adapters: int64 [T], slot of each token's adapter, -1 for none; None where none has one.
            loras: The adapters of qkv, o, gate_up and down of each block, in this order.

        Returns:
            Logits fp32 [R, vocabulary] of the tokens `rows`.
        """
        needed = native.loaded().ptq_decoder_workspace(byref(self._decoder), len(ids))
        if needed > len(self._workspace):
            self._workspace = native.aligned(needed)
        logits = torch.empty(len(rows), self._vocabulary)
        tensors = (ids, positions, slots, block_tables, query_start, context_len, rows)
        held = [tensor.contiguous() for tensor in tensors]
        problem = c_int32(0)
        step = _Step(
            *map(pointer, held),
            len(ids),
            len(context_len),
            block_tables.shape[1],
            len(rows),
            logits.data_ptr(),
            self._workspace.data_ptr(),
            ctypes.addressof(problem),
            None,  # the call finds room for partial sums
            pointer(taps),
            pointer(hidden),
            0 if taps is None else len(taps),
            pointer(adapters),
            None if loras is None else loras.address,
        )
        if native.call("decoder_step", byref(self._decoder), byref(step)):
            raise MemoryError("no memory for the partial sums of attention")
        native.report(problem)
        return logits

    def _layer(self, spec: LinearSpec) -> _Layer:
        scales = map(pointer, (spec.scale, spec.sink_scale))
        return _Layer(spec.packed.data_ptr(), *scales, spec.group, KINDS[spec.inputs])

    def _block(self, spec: BlockSpec) -> _Block:
        pool, kinds = spec.pool, check_pool(spec.pool)
        cache = (pool.k, pool.v, pool.k_scale, pool.v_scale, pool.k_offset)
        cache += (pool.k_feedback, pool.sink_k, pool.sink_v)
        norms = (spec.before_attention, spec.after_attention)
        norms += (spec.before_feed_forward, spec.after_feed_forward, spec.q_norm, spec.k_norm)
        whole = spec.q_norm is not None and len(spec.q_norm) != channels(pool.k)
        return _Block(
            *map(self._layer, (spec.qkv, spec.o, spec.gate_up, spec.down)),
            *map(pointer, (spec.cos, spec.sin, *norms, spec.sinks, *cache)),
            spec.window or 0,
            pool.k.shape[0],
            pool.turn,
            *formats(pool),
            *kinds,
            whole,
        )
