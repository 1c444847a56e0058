"""Compiled attention and cache writes, on every instruction set that runs here.

The twin says what is right. What the twin cannot say is that a query's row has the same bits in a
decode step, in a prefill and in any chunk of one, for any number of threads: contexts here reach
over several of the spans of 256 positions that threads share.
"""

from dataclasses import replace

import pytest
import torch

from kernels.cpu import native, native_attention
from kernels.op_inputs import KV_BLOCK, KVPool
from tests.kernels.cpu.test_attention import (
    EXTRAS,
    KINDS,
    check_cuts,
    check_near,
    make_cache,
    naive_attention,
)
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not native.supported(), reason="no C++ compiler")
ALL_KINDS = (*KINDS, "fp8 per_token", "bf16")


def cache_of(lengths, heads, dim, kind, seed=0):
    """As `make_cache`, and of bf16."""
    if kind != "bf16":
        return make_cache(lengths, heads, dim, kind, seed)
    cache = make_cache(lengths, heads, dim, "float", seed)
    return replace(cache, pool=KVPool(cache.pool.k.bfloat16(), cache.pool.v.bfloat16()))


def attend(cache, spans, window=None):
    return cache.attend(spans, window, native_attention.paged_attention)


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize(
    ("heads", "dim", "window"),
    [((4, 2), 32, None), ((6, 1), 80, 50), ((3, 3), 20, 1), ((8, 4), 8, 200), ((37, 1), 7, 70)],
)
def test_equals_its_twin(isa, kind, heads, dim, window):
    cache = cache_of([1, 64, 65, 600], heads, dim, kind)
    spans = [(0, 0, 1), (1, 50, 64), (2, 60, 65), (3, 598, 600)]
    check_near(attend(cache, spans, window), cache.attend(spans, window, naive_attention))


@pytest.mark.parametrize(
    ("heads", "dim", "window", "kind"),
    [
        ((4, 2), 64, None, "int8 per_channel"),
        ((3, 1), 80, 300, "fp8 per_token"),
        ((5, 5), 20, 70, "int8 per_head"),
        ((9, 1), 64, 270, "fp8 per_head"),
        ((2, 1), 40, None, "bf16"),
        ((7, 1), 16, None, "float"),
    ],
)
def test_decode_prefill_and_chunks_agree_bit_for_bit(isa, heads, dim, window, kind, with_threads):
    cache = cache_of([600, 130, 9], heads, dim, kind)
    cuts, positions = (1, 63, 256, 599), (0, 63, 64, 255, 256, 300, 599)
    part = lambda a, b: attend(cache, [(0, a, b)], window)[0]  # noqa: E731
    check_cuts(part, 600, cuts, positions, with_threads)


@pytest.mark.parametrize("dim", [64, 20])
@pytest.mark.parametrize("window", [None, 5])
def test_what_lies_beyond_the_context_does_not_count(isa, dim, window):
    cache = make_cache([70], (4, 2), dim, "float")
    want = attend(cache, [(0, 60, 70)], window)[0]
    last = int(cache.tables[0, 1])
    for held in (cache.pool.k, cache.pool.v):
        held[last, :, 6:] = torch.nan
    assert torch.equal(attend(cache, [(0, 60, 70)], window)[0], want)


def test_large_scores_and_nan(isa):
    cache = make_cache([300], (4, 2), 32, "float")
    cache.q[0] *= 1e4  # all weight on one position
    got = attend(cache, [(0, 290, 300)])[0]
    want = cache.attend([(0, 290, 300)], None, naive_attention)[0]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    cache.q[0][295, 1, 3] = torch.nan
    found = attend(cache, [(0, 290, 300)])[0].isnan()
    assert found[5, 1].all()
    assert found.sum() == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_may_be_part_of_a_wider_buffer(isa, dtype):
    cache = make_cache([200], (4, 2), 32)
    cache.q[0] = cache.q[0].to(dtype)

    def inside(q, inputs):
        wide = torch.full((len(q), 8, 32), torch.nan, dtype=dtype)
        wide[:, 2:6] = q
        return native_attention.paged_attention(wide[:, 2:6], inputs)

    got = cache.attend([(0, 150, 200)], None, inside)[0]
    assert got.dtype == dtype
    assert torch.equal(got, attend(cache, [(0, 150, 200)])[0])


def test_bad_arguments_are_told(isa):
    cache = make_cache([100])
    for table in (-1, len(cache.pool.k)):
        broken = replace(cache, tables=torch.tensor([[0, table]]))
        refused("block that the cache does not have", attend, broken, [(0, 99, 100)])
    with pytest.raises(ValueError, match="has a block in its table"):
        attend(replace(cache, tables=cache.tables[:, :1]), [(0, 99, 100)])
    with pytest.raises(ValueError, match="scales of K and V"):
        attend(replace(cache, pool=replace(cache.pool, k_scale=None)), [(0, 99, 100)])
    refused("needed is 1 at least", attend, cache, [(0, 99, 100)], 0)


def test_bad_writes_are_told_and_left_out(isa):
    x = torch.ones(2, 3, 16)
    k_pool, v_pool = (torch.zeros(5, 3, KV_BLOCK, 16, dtype=torch.int8) for _ in "kv")
    k_scale, v_scale = (torch.ones(5, 3, KV_BLOCK) for _ in "kv")

    def write(slots, dynamic=True):
        pool = KVPool(k_pool, v_pool, k_scale, v_scale, dynamic)
        native_attention.write_kv(x, x, pool, torch.tensor(slots))

    for slot in (-1, 5 * KV_BLOCK):
        refused("does not have", write, [slot, slot])
    assert not k_pool.any()
    for bad in (torch.nan, torch.inf):
        x[1, 2, 7] = bad
        refused("must be finite", write, [3, 4])
        assert not k_pool[0, 2, 4].any()
        assert bool((k_scale[0, 2, 4] == 1).all())
    refused("dynamic scales need a place", write, [3, 4], dynamic=False)


@pytest.mark.parametrize("kind", ["float", "int8 per_token", "fp8 per_head"])
def test_bounds_sinks_and_slopes_over_spans_that_threads_share(isa, kind, with_threads):
    cache = make_cache([700, 70], (6, 2), 48, kind, v_dim=64)
    for more in EXTRAS.values():
        spans = [(0, 690, 700), (1, 0, 70)]
        got = cache.attend(spans, **more)
        check_near(got, cache.attend(spans, None, naive_attention, **more), 4e-5)
        with_threads(3)
        (alone,) = cache.attend([(0, 699, 700)], **more)
        with_threads(1)
        assert torch.equal(alone, got[0][-1:])


def test_what_does_not_fit_the_queries_is_told(isa):
    cache = make_cache([70], (4, 2), 32, "float")
    refused(r"sinks are \(2,\); needed is \[4\]", cache.attend, [(0, 0, 70)], sinks=torch.zeros(2))
    refused("softcap is -1", cache.attend, [(0, 0, 70)], softcap=-1.0)
