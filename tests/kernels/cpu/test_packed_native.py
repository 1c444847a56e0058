"""Compiled kernels on an int4 cache, on every instruction set that runs here, beside plain torch.

Bytes and scales are those of the twin; a query's row has the same bits in a decode step, in a
prefill and in any chunk of one, as in caches of other types.
"""

from dataclasses import replace

import pytest
import torch

import kernels.reference as reference
import kernels.reference_attention as reference_attention
from kernels.cpu import native, native_attention, native_ops
from kernels.op_inputs import AttentionInputs, KVPool
from kernels.packed_cache import feedback_of, turn_size, turned
from tests.kernels.cpu.test_attention import check_cuts

pytestmark = pytest.mark.skipif(not native.supported(), reason="no C++ compiler")
KINDS = ("static", "by channel", "dynamic", "compensated", "k8v4 static", "k8v4 dynamic")
BLOCKS, TOKENS = 11, 600


def empty_pool(kind: str, heads: int, dim: int) -> KVPool:
    def held(packed: bool) -> torch.Tensor:
        size, dtype = (dim // 2, torch.uint8) if packed else (dim, torch.int8)
        return torch.zeros(BLOCKS, heads, 64, size, dtype=dtype)

    k, v = held(not kind.startswith("k8")), held(True)
    if kind.endswith(("dynamic", "compensated")):
        scales = (torch.ones(BLOCKS, heads, 64, dtype=torch.float16) for _ in "kv")
        return KVPool(k, v, *scales, dynamic=True)
    step = 0.02 if kind.startswith("k8") else 0.3
    k_scale = torch.linspace(step, 1.5 * step, heads)
    if kind == "by channel":
        k_scale = torch.linspace(step, 1.5 * step, heads * dim).view(heads, dim)
    return KVPool(k, v, k_scale, torch.linspace(0.3, 0.4, heads))


def filled(kind: str, heads: int, dim: int, write=reference.write_kv) -> KVPool:
    """A pool with the tokens of one sequence, in the blocks 10, 9, ..., 1."""
    generator = torch.Generator().manual_seed(dim)
    k, v = (torch.randn(TOKENS, heads, dim, generator=generator) for _ in "kv")
    k[3], v[5], v[7, 0] = 0, k[5] * 1e-7, torch.arange(dim) - (dim - 1) / 2
    pool = replace(
        empty_pool(kind, heads, dim), k_offset=torch.randn(heads, dim, generator=generator)
    )
    if kind == "compensated":
        queries = torch.randn(heads, 3 * dim, dim, generator=generator) * torch.linspace(1, 9, dim)
        pool = replace(pool, k_feedback=feedback_of(queries.mT @ queries, turn_size(dim)))
    slots = (BLOCKS - 1 - torch.arange(TOKENS) // 64) * 64 + torch.arange(TOKENS) % 64
    write(k, v, pool, slots)
    return pool


def attend(pool: KVPool, q: torch.Tensor, first: int, chosen, window=None) -> torch.Tensor:
    """Queries of the positions from `first` on."""
    last, tables = first + len(q), torch.arange(BLOCKS - 1, -1, -1)[None]
    lengths, starts = torch.tensor([last]), torch.tensor([0, len(q)])
    inputs = AttentionInputs(pool, tables, lengths, starts, q.shape[-1] ** -0.5, window)
    return chosen.paged_attention(q, inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 80, 6])
def test_write_kv_equals_its_twin(isa, kind, dim):
    got, want = filled(kind, 2, dim, native_attention.write_kv), filled(kind, 2, dim)
    for name in ("k", "v", "k_scale", "v_scale"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "dim", "window"), [((4, 2), 64, None), ((9, 1), 80, 300), ((3, 3), 6, 70)]
)
def test_attention_is_the_twins_and_no_cut_of_a_prefill_is_seen(
    isa, kind, heads, dim, window, with_threads
):
    pool = filled(kind, heads[1], dim)
    q = torch.randn(TOKENS, heads[0], dim, generator=torch.Generator().manual_seed(1))
    with_threads(1)
    whole = attend(pool, q, 0, native_attention, window)
    want = attend(pool, q[-30:], TOKENS - 30, reference_attention, window)
    torch.testing.assert_close(whole[-30:], want, atol=2e-5, rtol=2e-5)
    part = lambda a, b: attend(pool, q[a:b], a, native_attention, window)  # noqa: E731
    check_cuts(part, TOKENS, (63, 256), (0, 64, 255, 599), with_threads)


@pytest.mark.parametrize(("dim", "size"), [(64, 64), (80, 16), (24, 8), (6, 2), (256, 256)])
def test_turning_has_the_bits_of_its_twin(isa, dim, size):
    x = torch.randn(5, 3, dim + 2, generator=torch.Generator().manual_seed(1))[..., :dim]
    assert torch.equal(native_ops.turn_heads(x, size), turned(x, size))


def test_scales_that_do_not_fit_are_told(isa):
    pool = filled("dynamic", 2, 64)
    bad = replace(pool, k_scale=pool.k_scale.float())
    with pytest.raises(ValueError, match="with int4, fp16"):
        native_attention.check_pool(bad)
    wrong, x = replace(pool, k_feedback=torch.zeros(2, 64, 32)), torch.ones(1, 2, 64)
    with pytest.raises(ValueError, match="k_feedback is"):
        native_attention.write_kv(x, x, wrong, torch.ones(1))
    with pytest.raises(ValueError, match="NaN or infinity"):
        native_attention.write_kv(
            torch.full((1, 2, 64), torch.nan), torch.zeros(1, 2, 64), pool, torch.tensor([3])
        )
