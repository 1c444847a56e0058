"""A step of transformers' code on a GPU: our linear layers, cache and attention, torch's ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from typing_extensions import override

from inference.gpu.decoder import GpuBatch, sinks_of
from inference.gpu.layers import workspace_on
from inference.transformers_code.attention import Query, Step, widened
from inference.transformers_code.model import CodeModel, CodeShaped
from kernels.activations import Gate, Named
from kernels.attention_inputs import KVPool
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.paged_cache import head_size
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.attention.rope_cache import rope_write
from kernels.triton.attention.rotate import rotate
from kernels.triton.fused import add_rms_norm, gated_product
from kernels.triton.gated_norm import gated_norm


class CodeStep(Step):
    """The tokens of a step and the cache."""

    _batch: GpuBatch

    def __init__(self, model: CodeShaped, pools: Sequence[KVPool], batch: GpuBatch) -> None:
        super().__init__(model, pools, batch)
        self._dtype = model.dtype
        self._unturned = torch.zeros_like(batch.positions)  # all tokens at position 0

    @override
    def sinks(self, count: int) -> Tensor | None:
        return sinks_of(self.positions, count)

    @override
    def keep_output(self, x: Tensor) -> None:
        reads = self._batch.reads
        if reads is not None:
            reads.keep(x[:, None].to(reads.dtype), self._batch.slots)

    @override
    def attend(self, layer: int, own: Query) -> Tensor:
        pool, batch, size = self._pools[layer], self._batch, own.v.shape[2]
        wide = head_size(pool)
        q, k, v = (self._heads(x, wide) for x in (own.q, own.k, own.v))
        turn = _no_turn(wide, q.device)
        q = rope_write(q, k, v, *turn, pool, batch.slots, self._unturned, places=batch.positions)
        where = (batch.tables, batch.lengths, batch.query_start)
        inputs = own.inputs(pool, *where, self._windows[layer])
        workspace = workspace_on(q.device)
        if batch.query_start is None:
            return decode_attention(q, inputs, workspace)[..., :size]
        return prefill_attention(q, inputs, workspace, batch.decodes)[..., :size]

    @override
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return add_rms_norm(rows, None, weight, eps, dtype=x.dtype)[0].view(x.shape)

    @override
    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, form: Gate) -> Tensor:
        return gated_norm(x, gate, weight, eps, form)

    @override
    def gated_product(self, gate_up: Tensor, activation: Named) -> Tensor:
        return gated_product(gate_up, None, gate_up.dtype, activation=activation)[0]

    @override
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, k, cos, sin)

    def _heads(self, x: Tensor, size: int) -> Tensor:
        """Heads [T, heads, D] as the kernels take them: of their size, side by side."""
        x = widened(x.to(self._dtype), size)
        return x if x.stride()[1:] == (size, 1) else x.contiguous()


@cache
def _no_turn(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position 0: the model's own code has turned q and k."""
    return torch.ones(1, size, device=device), torch.zeros(1, size, device=device)


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
