"""Attention with what torch's own has no place for: bounded logits, sinks, biases of ALiBi."""

from __future__ import annotations

import torch
from torch import Tensor

QUERIES = 128  # that are attended to at once


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
) -> Tensor:
    """softmax(s) V of logits s = c tanh(q k^T scale / c) + m (j - i), in fp32.

    Args:
        query: [1, heads, tokens, D].
        key: [1, kv heads, tokens, D].
        value: [1, kv heads, tokens, D of V].
        mask: bool [1, 1, tokens, tokens], which keys j a query i sees; None for itself and those
            before.
        scale: Factor of q k^T; None for D ** -0.5.
        window: Of a query without a mask: how many keys it sees, itself among them.
        softcap: Bound c of the logits; None for none.
        sinks: A logit of each head [heads] in its softmax that has no value (gpt-oss).
        alibi: Slopes m [heads] (Press et al. 2022, arXiv 2108.12409).

    Returns:
        [1, heads, tokens, D of V], of the type of the values.
    """
    heads, tokens = query.shape[1], query.shape[2]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.float().repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    at, parts = torch.arange(tokens, device=query.device), []
    for start in range(0, tokens, QUERIES):
        rows = at[start : start + QUERIES]
        distance = at - rows[:, None]  # j - i [queries, tokens]
        logits = (query[:, :, rows].float() * factor) @ k.transpose(-1, -2)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if alibi is not None:
            logits = logits + alibi.float()[:, None, None] * distance
        seen = distance <= 0 if mask is None else mask[0, 0, rows]
        if mask is None and window is not None:
            seen = seen & (distance > -window)
        logits = logits.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(1, -1, 1, 1).expand(1, heads, len(rows), 1)
            logits = torch.cat((logits, sink), dim=-1)
        parts.append((logits.softmax(-1)[..., :tokens] @ v).to(value.dtype))
    return torch.cat(parts, dim=2)
