"""Attention as blocks run it: transformers' sdpa, with K and V shown, and replaced where wanted.

What torch's own has no place for runs in plain torch: bounded logits, sinks, biases of ALiBi.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from formats.families.family import LatentAttention

ATTENTION = "ptq_observed"  # the name that transformers knows it by
BESIDE = {"softcap": "softcap", "s_aux": "sinks", "alibi": "alibi"}  # by transformers' names
_CALLBACK = "ptq_on_kv"
_CACHE = "ptq_cache"
_QUERIES = "ptq_on_queries"

OnKV = Callable[[Tensor, Tensor], None]
OnGradient = Callable[[str, Tensor], None]
Cache = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Watched = AbstractContextManager[None]


def watched(attention: nn.Module, on_kv: OnKV | None, cache: Cache | None) -> Watched:
    """For a while, show what an attention module caches, or replace what it reads.

    Args:
        attention: The module, of a model built with `ATTENTION`.
        on_kv: Called with K after RoPE and V, both [tokens, kv heads, head_dim].
        cache: Makes of the same what attention reads of them.
    """
    return _left_on(attention, {_CALLBACK: on_kv, _CACHE: cache})


def watched_queries(attention: nn.Module, on_queries: Callable[[Tensor], None]) -> Watched:
    """For a while, show the queries of an attention module by the KV head that they read.

    Args:
        on_queries: Called with Q after RoPE [samples, kv heads, queries of each, tokens, head_dim].
    """
    return _left_on(attention, {_QUERIES: on_queries})


@contextmanager
def _left_on(attention: nn.Module, given: dict[str, Any]) -> Iterator[None]:
    """For a while, have on a module what of this is not None; `_attend` looks there."""
    names = [name for name, callback in given.items() if callback is not None]
    for name in names:
        setattr(attention, name, given[name])
    try:
        yield
    finally:
        for name in names:
            delattr(attention, name)


def watched_latent(attention: nn.Module, names: LatentAttention, on_kv: OnKV | None) -> Watched:
    """For a while, show what a module of latent attention caches; see `watched`.

    In the place of K stands the rotated part of the keys [tokens, 1, rotated], the pairs that turn
    together in two halves; in that of V the latent after its norm [tokens, 1, rank].
    """
    if on_kv is None:
        return nullcontext()
    rotated, latents = _rotated(attention, names), list[Tensor]()

    def on_keys(k: Tensor, _: Tensor) -> None:
        part = _in_halves(k[:, :1, -rotated:], names)  # all heads have the same
        on_kv(part, latents.pop().flatten(0, -2)[:, None])

    return _latent_shown(attention, names, latents.append, watched(attention, on_keys, None))


@contextmanager
def _latent_shown(
    attention: nn.Module, names: LatentAttention, on_latent: Callable[[Any], None], also: Watched
) -> Iterator[None]:
    """For a while, show the latents of a module after their norm."""
    norm = attention.get_submodule(names.kv_norm)
    with norm.register_forward_hook(lambda _, __, latent: on_latent(latent)), also:
        yield


def watched_gradients(
    attention: nn.Module, names: LatentAttention | None, on_gradient: OnGradient
) -> Watched:
    """For a while, show the gradients of what an attention module caches, when they come.

    Args:
        attention: The module, of a model built with `ATTENTION`.
        names: Its declaration, where it caches latents; what they are, `watched_latent` tells.
        on_gradient: Called with `k_cache` or `v_cache` and the gradient [tokens, kv heads, D] of
            what `watched` shows.
    """
    if names is None:

        def show(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            k.register_hook(lambda g: on_gradient("k_cache", g))
            v.register_hook(lambda g: on_gradient("v_cache", g))
            return k, v

        return watched(attention, None, show)
    rotated = _rotated(attention, names)

    def on_keys(g: Tensor) -> None:
        part = g[..., -rotated:].sum(dim=1, keepdim=True)  # which all heads share
        on_gradient("k_cache", _in_halves(part, names))

    def show_keys(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k.register_hook(on_keys)
        return k, v

    def show_latent(latent: Tensor) -> None:
        latent.register_hook(lambda g: on_gradient("v_cache", g.flatten(0, -2)[:, None]))

    return _latent_shown(attention, names, show_latent, watched(attention, None, show_keys))


def _rotated(attention: nn.Module, names: LatentAttention) -> int:
    """How many channels of its keys turn, the last ones."""
    rows = attention.get_submodule(names.kv_a).get_parameter("weight").shape[0]
    return rows - len(attention.get_submodule(names.kv_norm).get_parameter("weight"))


def _in_halves(part: Tensor, names: LatentAttention) -> Tensor:
    """What turns of keys [..., rotated], the pairs that turn together in two halves."""
    if names.watched_pairs == "interleaved":
        part = part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return part


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """transformers' attention function; what `watched` left on the module takes part."""
    mask = attention_mask
    callback, cache = getattr(module, _CALLBACK, None), getattr(module, _CACHE, None)
    if callback is not None:
        callback(*(_by_token(x).flatten(0, -3) for x in (key, value)))
    if (on_queries := getattr(module, _QUERIES, None)) is not None:
        on_queries(query.unflatten(1, (key.shape[1], -1)))
    if cache is not None:
        cached = cache(_by_token(key), _by_token(value))
        key, value = ((x if x.dim() == 4 else x[None]).transpose(1, 2) for x in cached)
    window = kwargs.get("sliding_window") if mask is None else None
    beside = {ours: kwargs[name] for name, ours in BESIDE.items() if kwargs.get(name) is not None}
    if beside or (window is not None and window < query.shape[2]):
        scale = kwargs.get("scaling")
        out = plain_attention(query, key, value, mask, scale, window=window, **beside)
        return out.transpose(1, 2).contiguous(), None
    if mask is None and not kwargs.get("dropout"):
        attention = causal_attention if query.device.type == "cpu" else _fused_attention
        out = attention(query, key, value, kwargs.get("scaling"))
        return out.transpose(1, 2).contiguous(), None
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)


def _by_token(x: Tensor) -> Tensor:
    """[1, heads, tokens, D] as [tokens, heads, D]; of several samples each of them."""
    return x.transpose(1, 2) if len(x) > 1 else x[0].transpose(0, 1)


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """`causal_attention` on a GPU, whose kernel for fp32 keeps no scores but shares no heads."""
    shared = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attention of tokens to themselves and those before, without the products with later keys.

    torch's own does multiply many of them on a CPU: this takes little more than half its time.

    Args:
        query: [1, heads, tokens, head_dim].
        key: [1, kv heads, tokens, head_dim].
        value: [1, kv heads, tokens, head_dim].
        scale: Of the products; None for head_dim ** -0.5.

    Returns:
        [1, heads, tokens, head_dim].
    """
    tokens, shared = query.shape[2], query.shape[1] != key.shape[1]
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril_()
    parts = []
    for start in range(0, tokens, QUERIES):
        stop = min(start + QUERIES, tokens)
        part = F.scaled_dot_product_attention(
            query[:, :, start:stop],
            key[:, :, :stop],
            value[:, :, :stop],
            attn_mask=seen[start:stop, :stop],
            scale=scale,
            enable_gqa=shared,
        )
        parts.append(part)
    return torch.cat(parts, dim=2)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


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
        query: [samples, heads, tokens, D].
        key: [samples, kv heads, tokens, D].
        value: [samples, kv heads, tokens, D of V].
        mask: bool [1, 1, tokens, tokens], which keys j a query i sees; None for itself and those
            before.
        scale: Factor of q k^T; None for D ** -0.5.
        window: Of a query without a mask: how many keys it sees, itself among them.
        softcap: Bound c of the logits; None for none.
        sinks: A logit of each head [heads] in its softmax that has no value (gpt-oss).
        alibi: Slopes m [heads] (Press et al. 2022, arXiv 2108.12409).

    Returns:
        [samples, heads, tokens, D of V], of the type of the values.
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
            sink = sinks.float().view(1, -1, 1, 1).expand(len(query), heads, len(rows), 1)
            logits = torch.cat((logits, sink), dim=-1)
        parts.append((logits.softmax(-1)[..., :tokens] @ v).to(value.dtype))
    return torch.cat(parts, dim=2)
