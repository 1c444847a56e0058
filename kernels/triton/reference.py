"""Plain torch twins of the GPU kernels: what each computes, slow and without tricks.

In fp64 where rounding is not part of the contract. W8A8's twin is `kernels.reference.int8_linear`.
Arguments are those of the function of the same name, weights as they are before packing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import kernels.reference as reference
from kernels.numerics import FP8, INT4, INT8, block_absmax, choose_scale, dequantize, quantize
from kernels.op_inputs import Activation, AttentionInputs, Clamped, KVPool
from kernels.packed_cache import compensated, pack_halves, token_scales, turned, unpack_halves


def grouped_linear(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:
    """W4A16, W8A16 and W4A8: fp64 [M, N] of x [M, K] and a weight as it was before packing."""
    out = x.double() @ grouped_weight(q, scale, zero_point).T
    if x_scale is not None:
        out = out * x_scale.double().reshape(-1, 1)
    return out if bias is None else out + bias.double()


def grouped_weight(q: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """fp64 [N, K] of integers q [N, K], scales and zero points [N, groups]."""
    group = q.shape[1] // scale.shape[1]
    values = q.double()
    if zero_point is not None:
        values -= zero_point.double().repeat_interleave(group, dim=1)
    return values * scale.double().repeat_interleave(group, dim=1)


def float_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W16A16: fp64 [M, N] of x [M, K] and a weight [N, K]."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def scaled_linear(
    xq: Tensor, x_scale: Tensor, wq: Tensor, w_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """fp8: fp64 [M, N], scales of rows and of output channels."""
    out = (xq.double() @ wq.double().T) * x_scale.double().reshape(-1, 1) * w_scale.double()
    return out if bias is None else out + bias.double()


def fp8_block_linear(
    xq: Tensor, x_scale: Tensor, wq: Tensor, w_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """fp64 [M, N]; scales of runs of 128 of a row, and of blocks of 128 x 128 of the weight."""
    x = dequantize(xq.double(), x_scale.double(), block=(1, 128))
    weight = dequantize(wq.double(), w_scale.double(), block=(128, 128))
    out = x @ weight.T
    return out if bias is None else out + bias.double()


def decode_attention(q: Tensor, inputs: AttentionInputs) -> Tensor:
    """fp64 [S, Hq, D], one sequence at a time; zeros for a sequence of length 0."""
    some = inputs.context_len > 0
    starts = torch.tensor([0, *some.long().cumsum(0).tolist()])
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    out[some] = prefill_attention(q[some], replace(inputs, query_start=starts))
    return out


def prefill_attention(q: Tensor, inputs: AttentionInputs) -> Tensor:
    """fp64 [T, Hq, D], one sequence at a time."""
    assert inputs.query_start is not None
    pool, starts = inputs.pool, inputs.query_start.tolist()
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // pool.k.shape[1]
    for s, length in enumerate(inputs.context_len.tolist()):
        own = q[starts[s] : starts[s + 1]].double().unflatten(1, (-1, group))  # [n, Hkv, group, D]
        if len(own) == 0:
            continue
        pages = inputs.block_tables[s, : -(-length // 64)].long()
        k = dequantize_pages(numbers(pool.k), pool.k_scale, pages)[:, :length]  # [Hkv, t, D]
        v = dequantize_pages(numbers(pool.v.transpose(2, 3)), pool.v_scale, pages)[:, :length]
        if pool.sink_k is not None and pool.sink_v is not None:
            first = min(length, pool.sink_tokens)
            k[:, :first] = pool.sink_k[pages[0], :, :first].to(k.dtype)
            v[:, :first] = pool.sink_v[pages[0], :, :first].to(v.dtype)
        token = torch.arange(length, device=q.device)
        age = token[length - len(own) :, None] - token  # [n, t]
        hidden = (age < 0) | (age >= (inputs.sliding_window or length))
        scores = torch.einsum("nhgd,htd->hgnt", own, k) * inputs.softmax_scale
        scores = _changed(scores, age, inputs).masked_fill(hidden, -torch.inf)
        if inputs.sinks is not None:
            sinks = inputs.sinks.double().view(-1, group, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :length]
        v = v.masked_fill(hidden.all(0)[None, :, None], 0.0)  # what nobody sees may be anything
        out[starts[s] : starts[s + 1]] = torch.einsum("hgnt,htd->nhgd", weights, v).flatten(1, 2)
    return out


def latent_attention(q: Tensor, rotated: Tensor, inputs: AttentionInputs) -> Tensor:
    """fp64 [T, Hq, R], one sequence at a time; zeros for a sequence of length 0."""
    pool, starts = inputs.pool, inputs.query_start
    begins = range(len(q) + 1) if starts is None else starts.tolist()
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for s, length in enumerate(inputs.context_len.tolist()):
        own = slice(begins[s], begins[s + 1])
        count = own.stop - own.start
        if not count or not length:
            continue
        pages = inputs.block_tables[s, : -(-length // 64)].long()
        latents = dequantize_pages(pool.v, pool.v_scale, pages)[0, :length]  # [t, R]
        keys = dequantize_pages(pool.k, pool.k_scale, pages)[0, :length]
        scores = torch.einsum("nhr,tr->hnt", q[own].double(), latents)
        scores = scores + torch.einsum("nhp,tp->hnt", rotated[own].double(), keys)
        token = torch.arange(length, device=q.device)
        hidden = token > token[length - count :, None]  # [n, t]
        scores = (scores * inputs.softmax_scale).masked_fill(hidden, -torch.inf)
        out[own] = torch.einsum("hnt,tr->nhr", torch.softmax(scores, dim=-1), latents)
    return out


def _changed(logits: Tensor, age: Tensor, inputs: AttentionInputs) -> Tensor:
    """Logits [Hkv, group, n, t] of keys so many tokens old [n, t], bounded and biased."""
    if inputs.softcap is not None:
        logits = inputs.softcap * torch.tanh(logits / inputs.softcap)
    if inputs.alibi is not None:
        logits = logits - inputs.alibi.double().view(*logits.shape[:2], 1, 1) * age
    return logits


def numbers(held: Tensor) -> Tensor:
    """What pages whose channels lie last hold: int4 is taken out of its bytes."""
    return unpack_halves(held) if held.dtype == torch.uint8 else held


def dequantize_pages(pool: Tensor, scale: Tensor | None, pages: Tensor) -> Tensor:
    """What a sequence's pages [., Hkv, 64, D] stand for: fp64 [Hkv, tokens, D]."""
    if scale is None:
        return pool[pages].double().transpose(0, 1).flatten(1, 2)
    wide = scale[pages] if scale.dim() == 3 else scale[None]
    shape = (wide.shape[0], wide.shape[1], wide.shape[2] if scale.dim() == 3 else 1, -1)
    values = pool[pages].double() * wide.double().reshape(shape)
    return values.transpose(0, 1).flatten(1, 2)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    group: int | None = None,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(rows, their scales, the sum) of norm(x + residual) * weight, in fp32."""
    own = x.float() if after is None else _rms_norm(x.float(), after, eps)
    total = x if residual is None else (own + residual.float()).to(x.dtype)
    y = total.float() if weight is None else _rms_norm(total.float(), weight, eps)
    return *quantize_rows(y, scale, dtype, group), total


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.double().square().mean(-1, keepdim=True) + eps).sqrt().float() * weight.float()


def norm_projections(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
    """qkv with q and k, its first columns, normed over all of their heads."""
    sizes = len(q_norm), len(k_norm)
    q, k, v = qkv.float().split([*sizes, qkv.shape[1] - sum(sizes)], dim=1)
    return torch.cat((_rms_norm(q, q_norm, eps), _rms_norm(k, k_norm, eps), v), 1).to(qkv.dtype)


def gated_product(
    gate_up: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    group: int | None = None,
    activation: Activation = "silu",
) -> tuple[Tensor, Tensor | None]:
    """(rows, their scales) of activation(gate) * up, gate_up [T, 2 I], in fp32."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    if isinstance(activation, Clamped):
        gate, up = gate.clamp(max=activation.bound), up.clamp(-activation.bound, activation.bound)
        y = gate * torch.sigmoid(activation.slope * gate) * (up + 1)
        return quantize_rows(y.float(), scale, dtype, group)
    kinds = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    }
    return quantize_rows((kinds[activation](gate) * up).float(), scale, dtype, group)


def quantize_rows(
    y: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    group: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y in a float type; or quantized, with one scale, else each row or run with its absmax's."""
    kinds = {kind.storage: kind for kind in (INT8, FP8)}
    if dtype not in kinds:
        return y.to(dtype), None
    block = (1, group or -1)
    if scale is None:
        scale = choose_scale(block_absmax(y, block), kinds[dtype])
    own = scale if scale.dim() == 2 else scale.reshape(())
    return quantize(y, own, kinds[dtype], block=block), scale


def likely(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor | None = None,
) -> Tensor:
    """Which tokens of a row may be drawn: bool [B, V]; see
    `inference.scheduling.sampler.keep_likely`.

    Probabilities are whole 2^-40ths of the largest, so that sums are exact in any order.
    """
    x = logits.float() / torch.where(temperature > 0, temperature, 1)[:, None]
    values, index = x.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(x.shape[1], device=x.device)
    first = rank < torch.where(top_k > 0, top_k, x.shape[1])[:, None]
    mass = (torch.exp(values - values[:, :1]) * 2.0**40).long() * first
    enough = mass.sum(1).double() * top_p.double()
    enough = torch.where(top_p < 1, enough, torch.inf)[:, None]
    keep = first & ((mass.cumsum(1) - mass).double() < enough)
    if log_min_p is not None:
        keep &= values >= values[:, :1] + log_min_p[:, None]
    return torch.zeros_like(keep).scatter(1, index, keep)


def uniform(seeds: Tensor, steps: Tensor, tokens: int) -> Tensor:
    """fp32 [B, V] in (0, 1]: the first word of Philox4x32-7, key `seed`, counter (token, step)."""
    mask, half = 2**32 - 1, 2**16 - 1
    seeds, steps = seeds[:, None], steps[:, None]
    token = torch.arange(tokens, device=seeds.device)
    words = [token, steps & mask, (steps >> 32) & mask, torch.zeros_like(token)]
    keys = [seeds & mask, (seeds >> 32) & mask]
    for _ in range(7):
        high, low = [], []
        for word, factor in ((words[2], 0xCD9E8D57), (words[0], 0xD2511F53)):
            below = (factor * (word & half)) >> 16
            high.append((factor * (word >> 16) + below) >> 16)
            low.append((factor * word) & mask)
        words = [high[0] ^ words[1] ^ keys[0], low[0], high[1] ^ words[3] ^ keys[1], low[1]]
        keys = [(keys[0] + 0x9E3779B9) & mask, (keys[1] + 0xBB67AE85) & mask]
    return (words[0].float() + 0.5) * 2.0**-32


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    steps: Tensor,
    log_min_p: Tensor | None = None,
) -> Tensor:
    """int64 [B]: the largest logit; or of x - log E, E exponential noise, over the likely."""
    v = uniform(seeds, steps, logits.shape[1]).double()
    x = logits.float() / torch.where(temperature > 0, temperature, 1)[:, None]
    noisy = x - (-torch.log1p(-v)).float().log()
    noisy = noisy.masked_fill(~likely(logits, temperature, top_k, top_p, log_min_p), -torch.inf)
    return torch.where(temperature > 0, noisy.argmax(1), x.argmax(1))


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: KVPool,
    slots: Tensor,
    positions: Tensor | None = None,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    growth: Tensor | None = None,
    places: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rotated q [T, Hq, D]; K (rotated, fp32) and V put into the cache, one token at a time.

    Both are turned after that, and K is centred, where the cache says so.
    """
    places = positions if places is None else places
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
        growth = None if growth is None else growth[positions]
    q_wide, k_wide = (
        x.float() if w is None else torch.nn.functional.rms_norm(x.float(), w.shape, w.float(), eps)
        for x, w in ((q, q_norm), (k, k_norm))
    )
    rotated, keys = reference.apply_rope(q_wide, k_wide, cos.float(), sin.float())
    if cache.turn:
        rotated, keys = turned(rotated, cache.turn), turned(keys, cache.turn)
    if cache.k_offset is not None:
        keys = keys - cache.k_offset
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, place = divmod(slot, 64)
        if cache.sink_k is not None and cache.sink_v is not None:
            assert places is not None
            if places[token] < cache.sink_tokens:
                cache.sink_k[page, :, places[token]] = keys[token].to(cache.sink_k.dtype)
                cache.sink_v[page, :, places[token]] = v[token].to(cache.sink_v.dtype)
        for x, pool, scale, feedback in (
            (keys[token], cache.k[page, :, place], cache.k_scale, cache.k_feedback),
            (v[token].float(), cache.v[page, :, :, place], cache.v_scale, None),
        ):  # [Hkv, D]
            _hold(x, pool, scale, feedback, page, place)
    if growth is not None:
        rotated = rotated * growth[:, None, None]
    return rotated.to(out_dtype or q.dtype)


def _hold(
    x: Tensor, pool: Tensor, scale: Tensor | None, feedback: Tensor | None, page: int, place: int
) -> None:
    """Put K or V of a token [Hkv, D] into its part of the pool, and its own scale into `scale`."""
    if scale is None:
        pool.copy_(x)
        return
    kind = {torch.int8: INT8, torch.uint8: INT4}.get(pool.dtype, FP8)
    if scale.dim() == 3:
        found = token_scales(x) if kind is INT4 else choose_scale(block_absmax(x, (1, -1)), kind)
        scale[page, :, place] = found[:, 0]
        own = scale[page, :, place].float().reshape(-1, 1)
    else:
        own = scale.reshape(scale.shape[0], -1)
    held = quantize(x, own, kind) if feedback is None else compensated(x, own, feedback)
    pool.copy_(pack_halves(held) if kind is INT4 else held)


def add_lora_reference(
    x: Tensor,
    x_scales: Tensor | None,
    y: Tensor,
    slots: Tensor,
    a: Tensor,
    b: Tensor,
    starts: tuple[int, ...],
) -> Tensor:
    """fp64 [T, N]: y + B (A x) of each row's slot, of tensors as `linear.lora.LoraStack` has them.

    Neither x nor A x is rounded.
    """
    wide, out = x.double(), y.double().clone()
    if x_scales is not None:
        runs = x_scales.double().reshape(-1, 1) if x_scales.dim() < 2 else x_scales.double()
        each = 128 if runs.shape[1] > 1 else x.shape[1]
        wide = wide * runs.repeat_interleave(each, dim=1)[:, : x.shape[1]]
    shared, stops = min(x.shape[1], a.shape[-1]), (*starts[1:], y.shape[1])
    for slot in range(len(a)):
        mine = slots == slot
        u = torch.einsum("tk,prk->ptr", wide[mine, :shared], a[slot, :, :, :shared].double())
        for own, start, stop in zip(u, starts, stops, strict=True):
            out[mine, start:stop] += own @ b[slot, start:stop].double().T
    return out


def linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, *, delta: bool,
    norm: bool = False, scale: float = 1.0, skip: Tensor | None = None, transposed: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """fp64 (outputs, the state after them): one token after the other."""
    share = v.shape[2] // q.shape[2]
    q, k = (x.double().repeat_interleave(share, dim=2) for x in (q, k))
    if norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    s, outputs, v = (state.mT if transposed else state).double(), [], v.double()
    for t in range(q.shape[1]):
        kept = decay[:, t].double().exp()
        s = s * (kept[..., None] if kept.dim() == 3 else kept[..., None, None])
        known = torch.einsum("bhrc,bhr->bhc", s, k[:, t]) if delta else 0.0
        u = beta[:, t, :, None].double() * (v[:, t] - known)
        s = s + k[:, t, :, :, None] * u[:, :, None]
        y = scale * torch.einsum("bhrc,bhr->bhc", s, q[:, t])
        outputs.append(y if skip is None else y + skip.double()[:, None] * v[:, t])
    return torch.stack(outputs, 1), s.mT if transposed else s
