"""Paged attention against its twin, and its promise: one query, one result, in any batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

import kernels.reference as reference
from kernels.ops import KV_BLOCK, paged_attention, write_kv


@dataclass
class Cache:
    """Sequences of random K and V in a paged cache, with the queries of all their positions."""

    q: list[torch.Tensor]
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    tables: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def attend(self, spans, window=None, attention=paged_attention) -> list[torch.Tensor]:
        """Attention of positions [begin, end) of sequences: `spans` is (sequence, begin, end)."""
        q = torch.cat([self.q[s][b:e] for s, b, e in spans])
        counts = [e - b for _, b, e in spans]
        out = attention(
            q,
            self.k_pool,
            self.v_pool,
            self.tables[[s for s, _, _ in spans]],
            torch.tensor([0, *itertools.accumulate(counts)]),
            torch.tensor([e for _, _, e in spans]),
            self.k_scale,
            self.v_scale,
            q.shape[-1] ** -0.5,
            window,
        )
        return list(out.split(counts))


def make_cache(lengths, heads=(4, 2), dim=32, quantized=True, seed=0) -> Cache:
    generator = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    blocks = [-(-length // KV_BLOCK) for length in lengths]
    order = torch.randperm(sum(blocks) + 1, generator=generator)  # scattered in the pool
    shape = (len(order), kv_heads, KV_BLOCK, dim)
    kind = torch.int8 if quantized else torch.float32
    stale = torch.randint(-127, 128, shape, generator=generator).to(kind)  # of earlier requests
    k_pool, v_pool = stale.clone(), stale.flip(0).clone()
    scale = torch.rand(kv_heads, generator=generator) * 0.02 + 0.02 if quantized else None
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)
    queries, taken = [], 0
    for s, length in enumerate(lengths):
        own = order[taken : taken + blocks[s]]
        taken += blocks[s]
        tables[s, : len(own)] = own
        position = torch.arange(length)
        slots = own[position // KV_BLOCK] * KV_BLOCK + position % KV_BLOCK
        k, v = (torch.randn(length, kv_heads, dim, generator=generator) for _ in "kv")
        write_kv(k, v, k_pool, v_pool, slots, scale, scale)
        queries.append(torch.randn(length, q_heads, dim, generator=generator) * 3)
    return Cache(queries, k_pool, v_pool, tables, scale, scale)


@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (3, 3), (8, 4)])
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("window", [None, 1, 50, 200])
def test_equals_its_twin(heads, quantized, window):
    cache = make_cache([1, 64, 65, 150], heads, 32, quantized)
    spans = [(0, 0, 1), (1, 0, 64), (2, 60, 65), (3, 140, 150)]
    got = cache.attend(spans, window)
    want = cache.attend(spans, window, reference.paged_attention)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (8, 8)])
@pytest.mark.parametrize("dim", [32, 64, 80])
@pytest.mark.parametrize("window", [None, 70])
def test_decode_prefill_and_chunks_agree_bit_for_bit(heads, dim, window):
    length = 200
    cache = make_cache([length, 130, 9], heads, dim)
    whole = cache.attend([(0, 0, length)], window)[0]
    for cut in (1, 2, 63, 64, 65, 128, 199):
        parts = [cache.attend([(0, a, b)], window)[0] for a, b in ((0, cut), (cut, length))]
        assert torch.equal(torch.cat(parts), whole), cut
    for position in (0, 1, 62, 63, 64, 127, 128, 199):
        alone = cache.attend([(0, position, position + 1)], window)[0]
        assert torch.equal(alone[0], whole[position]), position


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 8])
def test_the_batch_does_not_change_a_sequence(threads, with_threads):
    with_threads(threads)
    lengths = [1, 5, 64, 100, 129, 333, 40, 64, 70, 200, 3, 17, 90, 128, 256, 31]
    cache = make_cache(lengths)
    decode = [(s, length - 1, length) for s, length in enumerate(lengths)]
    alone = [cache.attend([span])[0] for span in decode]
    for order in (range(16), reversed(range(16)), (3, 11, 5), (0, 15)):
        order = list(order)
        for s, out in zip(order, cache.attend([decode[s] for s in order]), strict=True):
            assert torch.equal(out, alone[s])
    mixed = [(5, 300, 333), (0, 0, 1), (9, 199, 200), (3, 0, 100), (4, 128, 129)]
    for span, out in zip(mixed, cache.attend(mixed), strict=True):
        assert torch.equal(out, cache.attend([span])[0])


def test_a_long_prefill_is_cut_without_a_trace(monkeypatch):
    cache = make_cache([500])
    whole = cache.attend([(0, 0, 500)])[0]
    monkeypatch.setattr("kernels.cpu.attention.SCORES_AT_ONCE", 500 * 4 * 7)
    assert torch.equal(cache.attend([(0, 0, 500)])[0], whole)


def test_no_queries_give_no_rows():
    cache = make_cache([10, 20])
    assert [len(out) for out in cache.attend([(0, 10, 10), (1, 20, 20)])] == [0, 0]
    got = cache.attend([(0, 10, 10), (1, 0, 20)])
    assert torch.equal(got[1], cache.attend([(1, 0, 20)])[0])


def test_write_kv_equals_its_twin():
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(9, 3, 16, generator=generator) for _ in "kv")
    slots = torch.randperm(5 * KV_BLOCK, generator=generator)[:9]
    scale = torch.tensor([0.01, 0.02, 0.005])  # small enough to clamp
    pools = [torch.zeros(5, 3, KV_BLOCK, 16, dtype=torch.int8) for _ in range(4)]
    write_kv(k, v, pools[0], pools[1], slots, scale, scale)
    reference.write_kv(k, v, pools[2], pools[3], slots, scale, scale)
    assert torch.equal(pools[0], pools[2])
    assert torch.equal(pools[1], pools[3])
    assert pools[0].abs().max() == 127
