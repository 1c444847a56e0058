"""Functions that transformers' code calls for layers that keep a state, by our kernels.

They take and give what those of the same names in its files do, as far as its own code uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.transformers_code.state_pool import StatesInRows
from kernels.triton.convolution import causal_convolution
from kernels.triton.recurrence import TimeSteps, linear_recurrence


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
