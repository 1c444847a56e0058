"""A step of transformers' code on a GPU: our linear layers, cache and attention, torch's ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from inference.gpu.decoder import GpuBatch
from inference.gpu.layers import workspace_on
from inference.transformers_code.attention import Query, widened
from inference.transformers_code.model import CodeModel
from kernels.attention_inputs import AttentionInputs, KVPool
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.attention.rope_cache import rope_write


class CodeStep:
    """The tokens of a step and the cache; see `inference.transformers_code.attention.Step`.

    Args:
        model: What runs.
        pools: Its cache.
        batch: The tokens.
    """

    def __init__(self, model: CodeModel, pools: Sequence[KVPool], batch: GpuBatch) -> None:
        self._windows, self._dtype = model.config.windows, model.dtype
        self._pools, self._batch = pools, batch
        self.ids, self.positions, self.rows = batch.ids, batch.positions, batch.rows
        self._unturned = torch.zeros_like(batch.positions)  # all tokens at position 0

    def attend(self, layer: int, own: Query) -> Tensor:
        """Put keys and values into a layer's cache and attend: [T, Hq, Dv]."""
        pool, batch, size = self._pools[layer], self._batch, own.v.shape[2]
        wide = pool.k.shape[3]
        q, k, v = (self._heads(x, wide) for x in (own.q, own.k, own.v))
        cos = torch.ones(1, wide, device=q.device)  # the model's code has turned q and k
        sin = torch.zeros_like(cos)
        q = rope_write(q, k, v, cos, sin, pool, batch.slots, self._unturned)
        inputs = AttentionInputs(
            pool,
            batch.tables,
            batch.lengths,
            batch.query_start,
            softmax_scale=own.scale,
            sliding_window=self._windows[layer],
            softcap=own.softcap,
            sinks=None if own.sinks is None else own.sinks.float(),
            alibi=own.alibi,
        )
        workspace = workspace_on(q.device)
        if batch.query_start is None:
            return decode_attention(q, inputs, workspace)[..., :size]
        return prefill_attention(q, inputs, workspace, batch.decodes)[..., :size]

    def _heads(self, x: Tensor, size: int) -> Tensor:
        """Heads [T, heads, D] as the kernels take them: of their size, side by side."""
        x = widened(x.to(self._dtype), size)
        return x if x.stride()[1:] == (size, 1) else x.contiguous()


def forward_code(model: CodeModel, pools: Sequence[KVPool], batch: GpuBatch) -> Tensor:
    """Run the tokens of a step: logits fp32 [R, vocabulary]."""
    return model.logits(CodeStep(model, pools, batch))


def asks_host(run: Callable[[], object]) -> bool:
    """Whether what is run on a GPU waits for it, or for the host, and so cannot be captured."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False
