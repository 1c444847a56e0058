"""A step of transformers' code on a GPU: our linear layers, cache and attention, torch's ops.

Functions that the code calls for layers that keep a state are our kernels, too: they take and give
what those of the same names in its files do, as far as its own code uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from inference.gpu.decoder import GpuBatch, sinks_of
from inference.gpu.layers import workspace_on
from inference.transformers_code.attention import Query, Step, widened
from inference.transformers_code.model import CodeModel, CodeShaped
from inference.transformers_code.state_rows import StatesInRows
from kernels.op_inputs import Gate, KVPool, Named
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.paged_cache import head_size
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.attention.rope_cache import rope_write, rotate
from kernels.triton.convolution import causal_convolution
from kernels.triton.fused import add_rms_norm, gated_product
from kernels.triton.norms import gated_norm
from kernels.triton.recurrence import TimeSteps, linear_recurrence


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


def stored(state: Tensor) -> dict[str, Any]:
    """Where states are, as our kernels take it."""
    if isinstance(state, StatesInRows):
        return {"state": state.pool, "places": state.rows}
    return {"state": state}


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, of several tokens or of one; Kimi Linear's, whose g is by channel."""
    sizes = (len(value), value.shape[2], key.shape[-1], value.shape[-1])
    state = initial_state
    if state is None:
        state = torch.zeros(sizes, dtype=torch.float32, device=value.device)
    out = linear_recurrence(
        query, key, value, g, beta, **stored(state), delta=True, norm=use_qk_l2norm_in_kernel,
        scale=key.shape[-1] ** -0.5,
    )  # fmt: skip
    return out, state if output_final_state else None


def state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Mamba-2's next token; what it has for a head is expanded to the head's channels."""
    bias, skip = (None if own is None else own[:, 0] for own in (dt_bias, D))
    out = linear_recurrence(
        C[:, None], B[:, None], hidden_states[:, None], None, dt[:, None, :, 0], **stored(state),
        delta=False, steps=TimeSteps(A[:, 0, 0], bias, dt_softplus, float("-inf")), skip=skip,
        transposed=True,
    )[:, 0]  # fmt: skip
    return out if z is None else out * F.silu(z)


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2's several tokens; chunks are not needed."""
    steps, state = TimeSteps(A, dt_bias, dt_softplus, *dt_limit), initial_states
    batch, _tokens, heads, size = hidden_states.shape
    if state is None:
        sizes = (batch, heads, size, B.shape[-1])
        state = torch.zeros(sizes, dtype=torch.float32, device=B.device)
    out = linear_recurrence(
        C, B, hidden_states, None, dt, **stored(state), delta=False, steps=steps, skip=D,
        transposed=True,
    )  # fmt: skip
    return (out, state) if return_final_states else out


def next_convolution(
    hidden_states: Tensor, conv_state: Tensor | None, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Of the next token [B, C, 1] after a state, which is changed in place."""
    silu = activation in ("silu", "swish")
    if not silu and activation is not None:
        raise TypeError(f"convolutions with {activation}")
    given = {} if conv_state is None else stored(conv_state)
    return causal_convolution(hidden_states, weight, bias, silu=silu, **given)


def convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Of a sequence [B, C, T] from its first token on."""
    return next_convolution(hidden_states, None, weight, bias, activation)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "torch_recurrent_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "recurrent_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": chunk_scan,
    "mamba2_selective_state_update": state_update,
    "causal_conv1d_fn": convolution,
    "causal_conv1d_update": next_convolution,
}
