"""Paged attention against fp64, and its promise: one query, one result, in any batch."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.numerics import TINY_SCALE
from kernels.op_inputs import KV_BLOCK, AttentionInputs, KVPool
from kernels.ops import paged_attention, write_kv

KINDS = ("float", "int8 per_head", "int8 per_channel", "int8 per_token", "fp8 per_head")
STORAGE = {"float": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass
class Cache:
    """Sequences of random K and V in a paged cache, with the queries of all their positions."""

    q: list[Tensor]
    pool: KVPool
    tables: Tensor

    def attend(self, spans, window=None, attention=paged_attention, **more) -> list[Tensor]:
        """Attention of positions [begin, end) of sequences: `spans` is (sequence, begin, end)."""
        q = torch.cat([self.q[s][b:e] for s, b, e in spans])
        counts = [e - b for _, b, e in spans]
        tables, ends = self.tables[[s for s, _, _ in spans]], torch.tensor([e for _, _, e in spans])
        starts = torch.tensor([0, *itertools.accumulate(counts)])
        inputs = AttentionInputs(
            self.pool, tables, ends, starts, q.shape[-1] ** -0.5, window, **more
        )
        return list(attention(q, inputs).split(counts))


def check_near(found: list[Tensor], wanted: list[Tensor], near: float = 2e-5) -> None:
    torch.testing.assert_close(found, wanted, atol=near, rtol=near)


def check_cuts(attend, length: int, cuts, positions, with_threads=None) -> None:
    """Each query has one result: in a whole prompt, in two parts of one, and in a step of its own.

    Args:
        attend: Attention of the positions [begin, end).
        length: Of the prompt.
        cuts: Where it is cut in two.
        positions: Of steps of one token.
        with_threads: Sets the number of threads, where that must not matter.
    """
    set_threads = with_threads or (lambda threads: None)
    set_threads(1)
    whole = attend(0, length)
    for cut in cuts:
        set_threads(1 + cut % 4)
        assert torch.equal(torch.cat([attend(0, cut), attend(cut, length)]), whole), cut
    for position in positions:
        for threads in (1, 4) if with_threads else (1,):
            set_threads(threads)
            alone = attend(position, position + 1)
            assert torch.equal(alone[0], whole[position]), (position, threads)


def naive_attention(q: Tensor, inputs: AttentionInputs) -> Tensor:
    """Softmax of each query over its visible positions, one query and head at a time, in fp64."""
    pool, starts = inputs.pool, inputs.query_start
    out, group = q.new_zeros(*q.shape[:2], pool.v.shape[3]), q.shape[1] // pool.k.shape[1]
    for s, context in enumerate(inputs.context_len.tolist()):
        k, v = (
            dequantized(held, scale, inputs.block_tables[s]).transpose(1, 2).flatten(0, 1)
            for held, scale in ((pool.k, pool.k_scale), (pool.v, pool.v_scale))
        )  # [positions, Hkv, D]
        first, last = starts[s : s + 2].tolist()
        for row in range(first, last):
            position = context - (last - row)
            begin = max(0, position + 1 - (inputs.sliding_window or context))
            for head in range(q.shape[1]):
                keys, values = (x[begin : position + 1, head // group] for x in (k, v))
                scores = keys @ q[row, head].double() * inputs.softmax_scale
                if inputs.softcap is not None:
                    scores = torch.tanh(scores / inputs.softcap) * inputs.softcap
                if inputs.alibi is not None:
                    distance = torch.arange(begin - position, 1)
                    scores = scores + inputs.alibi[head].double() * distance
                if inputs.sinks is not None:
                    scores = torch.cat((scores, inputs.sinks[head].double().view(1)))
                    values = torch.cat((values, torch.zeros_like(values[:1])))
                out[row, head] = (torch.softmax(scores, dim=0) @ values).to(q.dtype)
    return out


def dequantized(held: Tensor, scale: Tensor | None, blocks: Tensor) -> Tensor:
    """What cached numbers stand for: fp64 [blocks, Hkv, 64, D]."""
    values = held[blocks].double()
    if scale is None:
        return values
    if scale.dim() == 3:  # one for each cached token
        return values * scale[blocks].double()[..., None]
    return values * scale.double().reshape(1, scale.shape[0], 1, -1)


def naive_write(k: Tensor, v: Tensor, pool: KVPool, slots: Tensor) -> None:
    """Token by token, head by head."""
    for x, held, scale in ((k, pool.k, pool.k_scale), (v, pool.v, pool.v_scale)):
        top = 127.0 if held.dtype == torch.int8 else 448.0
        for token, slot in enumerate(slots.tolist()):
            for head in range(held.shape[1]):
                row, place = x[token, head].float(), (slot // KV_BLOCK, head, slot % KV_BLOCK)
                if scale is not None and pool.dynamic:
                    scale[place] = (row.abs().max() / top).clamp(min=TINY_SCALE)
                    row = row / scale[place]
                elif scale is not None:
                    row = row / scale[head]
                if scale is not None:
                    row = (row.round() if held.dtype == torch.int8 else row).clamp(-top, top)
                held[place] = row.to(held.dtype)


def make_scales(kind, generator, blocks, heads, dim) -> tuple:
    """Scales of K and V of a kind of cache, before anything is written."""
    if kind == "float":
        return None, None
    if kind.endswith("per_token"):
        return tuple(torch.ones(blocks, heads, KV_BLOCK) for _ in "kv")
    shape = (heads, dim) if kind == "int8 per_channel" else (heads,)
    top = 127 if kind.startswith("int8") else 448
    k = (torch.rand(shape, generator=generator) * 2 + 3) / top
    return k, (torch.rand(heads, generator=generator) * 2 + 3) / top


def make_cache(
    lengths, heads=(4, 2), dim=32, kind="int8 per_head", seed=0, v_dim: int | None = None
) -> Cache:
    generator = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    blocks = [-(-length // KV_BLOCK) for length in lengths]
    order = torch.randperm(sum(blocks) + 1, generator=generator)  # scattered in the pool
    shape = (len(order), kv_heads, KV_BLOCK, dim)
    dtype = STORAGE[kind.split()[0]]
    stale = torch.randint(-127, 128, shape, generator=generator).to(dtype)  # of earlier requests
    scales = make_scales(kind, generator, len(order), kv_heads, dim)
    stale_v = torch.cat((stale.flip(0), stale), dim=-1)[..., : v_dim or dim].contiguous()
    pool = KVPool(stale.clone(), stale_v.clone(), *scales, kind.endswith("per_token"))
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)
    queries, taken = [], 0
    for s, length in enumerate(lengths):
        own = order[taken : taken + blocks[s]]
        taken += blocks[s]
        tables[s, : len(own)] = own
        position = torch.arange(length)
        slots = own[position // KV_BLOCK] * KV_BLOCK + position % KV_BLOCK
        k, v = (
            torch.randn(length, kv_heads, size, generator=generator) for size in (dim, v_dim or dim)
        )
        write_kv(k, v, pool, slots)
        queries.append(torch.randn(length, q_heads, dim, generator=generator) * 3)
    return Cache(queries, pool, tables)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (3, 3), (8, 4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 1, 50, 200])
def test_equals_attention_in_fp64(heads, kind, window):
    cache = make_cache([1, 64, 65, 150], heads, 32, kind)
    spans = [(0, 0, 1), (1, 0, 64), (2, 60, 65), (3, 140, 150)]
    check_near(cache.attend(spans, window), cache.attend(spans, window, naive_attention))


EXTRAS = {  # of 6 query heads; what they see is of size 24, 16 or 40
    "softcap": {"softcap": 4.0},
    "sinks": {"sinks": torch.linspace(-3, 6, 6)},
    "alibi": {"alibi": torch.tensor([0.5, 0.25, 0.125, 0.06, 0.03, 0.01])},
    "all": {
        "softcap": 9.0,
        "sinks": torch.linspace(4, -4, 6),
        "alibi": torch.linspace(0.01, 0.3, 6),
    },
    "none": {},
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("v_dim", [16, 24, 40])
def test_bounds_sinks_slopes_and_sizes_of_v(extra, kind, v_dim):
    cache = make_cache([1, 65, 330], (6, 2), 24, kind, v_dim=v_dim)
    more, spans = EXTRAS[extra], [(0, 0, 1), (1, 60, 65), (2, 300, 330)]
    for window in (None, 50):
        got = cache.attend(spans, window, **more)
        check_near(got, cache.attend(spans, window, naive_attention, **more), 4e-5)
    alone = cache.attend([(2, 329, 330)], 50, **more)[0]
    assert torch.equal(alone, got[2][-1:])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (8, 8)])
@pytest.mark.parametrize("dim", [32, 80, 128])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("kind", ["int8 per_head", "fp8 per_token"])
def test_decode_prefill_and_chunks_agree_bit_for_bit(heads, dim, window, kind):
    cache = make_cache([200, 130, 9], heads, dim, kind)
    cuts, positions = (1, 2, 63, 64, 65, 128, 199), (0, 1, 62, 63, 64, 127, 128, 199)
    check_cuts(lambda a, b: cache.attend([(0, a, b)], window)[0], 200, cuts, positions)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 8])
def test_the_batch_does_not_change_a_sequence(every_backend, threads, with_threads):
    lengths = [1, 5, 64, 100, 129, 333, 40, 1100, 70, 200, 3, 17, 90, 128, 256, 31]
    cache = make_cache(lengths)
    with_threads(1)
    decode = [(s, length - 1, length) for s, length in enumerate(lengths)]
    alone = [cache.attend([span])[0] for span in decode]
    with_threads(threads)
    for order in (range(16), reversed(range(16)), (7, 11, 5), (3, 11, 5), (0, 7), (0, 15)):
        order = list(order)
        for s, out in zip(order, cache.attend([decode[s] for s in order]), strict=True):
            assert torch.equal(out, alone[s])
    mixed = [(5, 300, 333), (7, 1099, 1100), (0, 0, 1), (9, 199, 200), (9, 200, 200)]
    mixed += [(3, 0, 100), (4, 128, 129), (7, 900, 1000)]
    for span, out in zip(mixed, cache.attend(mixed), strict=True):
        assert torch.equal(out, cache.attend([span])[0])


@pytest.mark.usefixtures("backend")
def test_a_long_prefill_is_cut_without_a_trace(monkeypatch):
    cache = make_cache([500])
    whole = cache.attend([(0, 0, 500)])[0]
    monkeypatch.setattr("kernels.reference_attention.SCORES_AT_ONCE", 500 * 4 * 7)
    assert torch.equal(cache.attend([(0, 0, 500)])[0], whole)


@pytest.mark.usefixtures("backend")
def test_no_queries_give_no_rows():
    cache = make_cache([10, 20])
    assert [len(out) for out in cache.attend([(0, 10, 10), (1, 20, 20)])] == [0, 0]
    got = cache.attend([(0, 10, 10), (1, 0, 20)])
    assert torch.equal(got[1], cache.attend([(1, 0, 20)])[0])


def written_by(writes, kind, k, v, slots, blocks=5) -> list[list[Tensor | None]]:
    """Pools and scales as each of some `write_kv` leaves them; the scales clamp."""
    generator = torch.Generator().manual_seed(1)
    bf16, (heads, dim) = kind == "bf16", k.shape[1:]
    scales = make_scales("float" if bf16 else kind, generator, blocks, heads, dim)
    scales = [s if s is None or s.dim() == 3 else s * 0.3 for s in scales]
    dtype = torch.bfloat16 if bf16 else STORAGE[kind.split()[0]]
    found = []
    for write in writes:
        pool = KVPool(
            *(torch.zeros(blocks, heads, KV_BLOCK, dim, dtype=dtype) for _ in "kv"),
            *(None if s is None else s.clone() for s in scales),
            dynamic=kind.endswith("per_token"),
        )
        write(k, v, pool, slots)
        found.append([pool.k, pool.v, pool.k_scale, pool.v_scale])
    return found


@pytest.mark.parametrize("kind", [*KINDS, "fp8 per_token", "bf16"])
@pytest.mark.parametrize("dim", [16, 20, 7, 80])
def test_write_kv_puts_every_token_in_its_place(every_backend, kind, dim, with_threads):
    with_threads(3)
    qkv = torch.randn(9, 9, dim)
    qkv[3, 3:] = 0
    qkv[4, 3:] *= 1e-4  # e4m3's subnormals
    slots = torch.randperm(5 * KV_BLOCK)[:9]
    writes = (write_kv, naive_write)
    found, wanted = written_by(writes, kind, qkv[:, 3:6], qkv[:, 6:], slots)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours is theirs is None or torch.equal(ours.float(), theirs.float())
    top = {"int8": 127, "fp8": 448}.get(kind.split()[0])
    assert top is None or found[0].float().abs().max() == top
