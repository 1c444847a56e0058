"""A step of transformers' code on a CPU, op by op."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from inference.cpu.batch import Batch
from inference.transformers_code.attention import Query, widened
from inference.transformers_code.model import CodeModel
from kernels.attention_inputs import AttentionInputs, KVPool
from kernels.ops import paged_attention, write_kv


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

    def attend(self, layer: int, own: Query) -> Tensor:
        """Put keys and values into a layer's cache and attend: [T, Hq, Dv]."""
        pool, batch, size = self._pools[layer], self._batch, own.v.shape[2]
        wide, wide_v = pool.k.shape[3], pool.v.shape[3]
        write_kv(widened(own.k, wide), widened(own.v, wide_v), pool, batch.slots)
        inputs = AttentionInputs(
            pool,
            batch.block_tables,
            batch.context_len,
            batch.query_start,
            softmax_scale=own.scale,
            sliding_window=self._windows[layer],
            softcap=own.softcap,
            sinks=None if own.sinks is None else own.sinks.float(),
            alibi=own.alibi,
        )
        return paged_attention(widened(own.q, wide), inputs)[..., :size]


def forward_code(model: CodeModel, pools: Sequence[KVPool], batch: Batch) -> Tensor:
    """Run the tokens of a step: logits fp32 [R, vocabulary] of the rows asked for."""
    return model.logits(CodeStep(model, pools, batch))
