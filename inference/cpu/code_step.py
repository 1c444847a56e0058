"""A step of transformers' code on a CPU, op by op."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from inference.cpu.batch import Batch
from inference.transformers_code.attention import Query, widened
from inference.transformers_code.model import CodeModel
from kernels.activations import Named
from kernels.attention_inputs import KVPool
from kernels.ops import (
    apply_rope,
    gated_product,
    paged_attention,
    rms_norm,
    turn_heads,
    write_kv,
)
from kernels.packed_cache import channels


class CodeStep:
    """The tokens of a step and the cache; see `inference.transformers_code.attention.Step`.

    Args:
        model: What runs.
        pools: Its cache.
        batch: The tokens.
    """

    def __init__(self, model: CodeModel, pools: Sequence[KVPool], batch: Batch) -> None:
        self._windows, self._pools, self._batch = model.config.windows, pools, batch
        self.ids, self.positions, self.rows = batch.ids, batch.positions, batch.rows

    def sinks(self, count: int) -> Tensor | None:
        """Which tokens are at the first `count` positions: bool [T]; None where none is."""
        return self._batch.sinks(count)

    def attend(self, layer: int, own: Query) -> Tensor:
        """Put keys and values into a layer's cache and attend: [T, Hq, Dv]."""
        pool, batch, size = self._pools[layer], self._batch, own.v.shape[2]
        wide, wide_v = channels(pool.k), channels(pool.v)
        q, k = widened(own.q, wide), widened(own.k, wide)
        if pool.turn:
            q, k = turn_heads(q, pool.turn), turn_heads(k, pool.turn)
        write_kv(k, widened(own.v, wide_v), pool, batch.slots, batch.positions)
        where = (batch.block_tables, batch.context_len, batch.query_start)
        inputs = own.inputs(pool, *where, self._windows[layer])
        return paged_attention(q, inputs)[..., :size]

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension: [..., H] to the same."""
        return rms_norm(x, weight, eps)

    def gated_product(self, gate_up: Tensor, activation: Named) -> Tensor:
        """activation(gate) * up of rows [T, 2 I], the gate's half first: [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return gated_product(gate, up, activation)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Turn channels i and i + D / 2 of heads [T, heads, D] by angles [T, D], halves equal."""
        return apply_rope(q, k, cos, sin)


def forward_code(model: CodeModel, pools: Sequence[KVPool], batch: Batch) -> Tensor:
    """Run the tokens of a step: logits fp32 [R, vocabulary] of the rows asked for."""
    return model.logits(CodeStep(model, pools, batch))
