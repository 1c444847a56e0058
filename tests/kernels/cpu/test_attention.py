"""Paged attention against its twin, and its promise: one query, one result, in any batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

import kernels.reference as reference
from kernels.ops import KV_BLOCK, paged_attention, write_kv

KINDS = ("float", "int8 per_head", "int8 per_channel", "int8 per_token", "fp8 per_head")
STORAGE = {"float": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass
class Cache:
    """Sequences of random K and V in a paged cache, with the queries of all their positions."""

    q: list[torch.Tensor]
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    tables: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

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


def make_cache(lengths, heads=(4, 2), dim=32, kind="int8 per_head", seed=0) -> Cache:
    generator = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    blocks = [-(-length // KV_BLOCK) for length in lengths]
    order = torch.randperm(sum(blocks) + 1, generator=generator)  # scattered in the pool
    shape = (len(order), kv_heads, KV_BLOCK, dim)
    dtype = STORAGE[kind.split()[0]]
    stale = torch.randint(-127, 128, shape, generator=generator).to(dtype)  # of earlier requests
    k_pool, v_pool = stale.clone(), stale.flip(0).clone()
    k_scale, v_scale = make_scales(kind, generator, len(order), kv_heads, dim)
    dynamic = kind.endswith("per_token")
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)
    queries, taken = [], 0
    for s, length in enumerate(lengths):
        own = order[taken : taken + blocks[s]]
        taken += blocks[s]
        tables[s, : len(own)] = own
        position = torch.arange(length)
        slots = own[position // KV_BLOCK] * KV_BLOCK + position % KV_BLOCK
        k, v = (torch.randn(length, kv_heads, dim, generator=generator) for _ in "kv")
        write_kv(k, v, k_pool, v_pool, slots, k_scale, v_scale, dynamic)
        queries.append(torch.randn(length, q_heads, dim, generator=generator) * 3)
    return Cache(queries, k_pool, v_pool, tables, k_scale, v_scale)


@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (3, 3), (8, 4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 1, 50, 200])
def test_equals_its_twin(heads, kind, window):
    cache = make_cache([1, 64, 65, 150], heads, 32, kind)
    spans = [(0, 0, 1), (1, 0, 64), (2, 60, 65), (3, 140, 150)]
    got = cache.attend(spans, window)
    want = cache.attend(spans, window, reference.paged_attention)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (8, 8)])
@pytest.mark.parametrize("dim", [32, 80, 128])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("kind", ["int8 per_head", "fp8 per_token"])
def test_decode_prefill_and_chunks_agree_bit_for_bit(heads, dim, window, kind):
    length = 200
    cache = make_cache([length, 130, 9], heads, dim, kind)
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


@pytest.mark.parametrize("kind", [*KINDS, "fp8 per_token"])
def test_write_kv_equals_its_twin(kind):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(9, 3, 16, generator=generator) for _ in "kv")
    slots = torch.randperm(5 * KV_BLOCK, generator=generator)[:9]
    k_scale, v_scale = make_scales(kind, generator, 5, 3, 16)
    if k_scale is not None and k_scale.dim() < 3:
        k_scale, v_scale = k_scale * 0.3, v_scale * 0.3  # small enough to clamp
    dtype, dynamic = STORAGE[kind.split()[0]], kind.endswith("per_token")
    found = []
    for write in (write_kv, reference.write_kv):
        pools = [torch.zeros(5, 3, KV_BLOCK, 16, dtype=dtype) for _ in "kv"]
        scales = [None if s is None else s.clone() for s in (k_scale, v_scale)]
        write(k, v, *pools, slots, *scales, dynamic)
        found.append([*pools, *scales])
    for ours, twin in zip(*found, strict=True):
        assert ours is twin is None or torch.equal(ours.float(), twin.float())
    top = {"int8": 127, "fp8": 448}.get(kind.split()[0])
    assert top is None or found[0][0].float().abs().max() == top
