"""int4 in the paged cache: packing, the turn of keys, and attention in plain torch over it."""

import math
from dataclasses import replace

import pytest
import torch

import kernels.reference as reference
import kernels.reference_attention as reference_attention
from formats.residual_rotation import hadamard_matrix
from kernels.op_inputs import AttentionInputs, KVPool
from kernels.packed_cache import (
    DAMPING,
    compensated,
    feedback_of,
    pack_halves,
    token_scales,
    turn_size,
    turned,
    unpack_halves,
)


def test_two_numbers_share_a_byte():
    q = torch.arange(-8, 8, dtype=torch.int8).view(2, 8)
    packed = pack_halves(q)
    assert packed.dtype == torch.uint8
    assert packed[0].tolist() == [0x40, 0x51, 0x62, 0x73]  # i low, i + 4 high, each q + 8
    assert torch.equal(unpack_halves(packed), q)


@pytest.mark.parametrize(("dim", "size"), [(64, 64), (96, 32), (80, 16), (128, 128), (6, 2)])
def test_turning_is_an_orthogonal_matrix_for_each_run(dim, size):
    assert turn_size(dim) == size
    x = torch.randn(5, 3, dim, generator=torch.Generator().manual_seed(1))
    matrix = hadamard_matrix(size)
    wanted = x.double().unflatten(-1, (-1, size)) @ (matrix / math.sqrt(size))
    assert torch.allclose(turned(x, size).double(), wanted.flatten(-2), atol=1e-6)
    assert torch.allclose(turned(turned(x, size), size), x, atol=1e-6)


def queries_of(heads: int, dim: int) -> torch.Tensor:
    """Queries [heads, n, dim] of which some directions are far larger than others."""
    generator = torch.Generator().manual_seed(5)
    mixed = torch.randn(heads, dim, dim, generator=generator) * torch.logspace(-1, 1, dim)
    return torch.randn(heads, 8 * dim, dim, generator=generator) @ mixed.mT


def test_feedback_is_the_best_answer_to_the_errors_of_later_channels():
    heads, dim, size = 2, 16, 8
    q = queries_of(heads, dim)
    found = feedback_of(q.mT @ q, size).double()
    seen = turned(q, size).double()
    moments = seen.mT @ seen
    mean = moments.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    moments += DAMPING * mean * torch.eye(dim)
    errors = torch.randn(heads, dim, generator=torch.Generator().manual_seed(6)).double()
    for j in range(4, dim, 4):  # the least e^T M e where channels before j may err by any number
        later = moments[:, :j, j:] @ errors[:, j:, None]
        best = -torch.linalg.solve(moments[:, :j, :j], later)[:, j - 4 :, 0]
        moved = (errors[:, j:, None] * found[:, j:, j - 4 : j]).sum(1)
        assert torch.allclose(-moved, best, rtol=1e-4, atol=1e-5), j
        assert not found[:, j - 4 : j, j - 4 :].any()


def test_feedback_lessens_what_queries_see_of_the_error():
    heads, dim = 2, 64
    q = queries_of(heads, dim)
    x = torch.randn(200, heads, dim, generator=torch.Generator().manual_seed(7))
    scale = token_scales(x).float()
    seen = turned(q, dim)

    def error(feedback: torch.Tensor) -> torch.Tensor:
        held = compensated(x, scale, feedback) * scale
        return torch.einsum("thd,hqd->thq", held - x, seen).square().mean()

    plain = feedback_of(torch.eye(dim).repeat(heads, 1, 1), dim)
    assert not plain.any()
    nearest = (x / scale).round().clamp(-8, 7).to(torch.int8)
    assert torch.equal(compensated(x, scale, plain), nearest)
    assert error(feedback_of(q.mT @ q, dim)) < 0.4 * error(plain)
    assert not feedback_of(torch.zeros(heads, dim, dim), dim).any()  # no query was seen


@pytest.mark.parametrize("kind", ["static", "by channel", "dynamic", "int8 keys"])
def test_attention_over_packed_pools_is_that_over_their_numbers(kind):
    generator = torch.Generator().manual_seed(2)
    tokens, heads, dim = 70, 2, 8
    k, v = (torch.randn(tokens, heads, dim, generator=generator) for _ in "kv")
    q = torch.randn(3, 4, dim, generator=generator)
    bytes_ = torch.zeros(2, heads, 64, dim // 2, dtype=torch.uint8)
    scales = (torch.full((heads,), 0.3), torch.full((heads,), 0.4))
    pool = KVPool(bytes_, bytes_.clone(), *scales)
    if kind == "by channel":
        pool = replace(pool, k_scale=torch.linspace(0.2, 0.4, heads * dim).view(heads, dim))
    if kind == "dynamic":
        k[0, 0] = 0  # its scale is the least that fp16 holds
        k[1, 0] = torch.tensor([4.0, -3, 2, 1, 0, 0, 0, 0])
        own = (torch.ones(2, heads, 64, dtype=torch.float16) for _ in "kv")
        pool = KVPool(bytes_, bytes_.clone(), *own, dynamic=True)
    if kind == "int8 keys":
        own = torch.zeros(2, heads, 64, dim, dtype=torch.int8)
        pool = replace(pool, k=own, k_scale=torch.full((heads,), 0.03))
    reference.write_kv(k, v, pool, torch.arange(tokens))
    if kind == "dynamic":
        assert pool.k_scale[0, 0, :2].tolist() == [2.0**-14, -0.5]
        assert unpack_halves(pool.k[0, 0, 1]).tolist() == [-8, 6, -4, -2, 0, 0, 0, 0]
    tables, lengths, starts = map(torch.tensor, ([[0, 1]], [tokens], [0, 3]))
    inputs = AttentionInputs(pool, tables, lengths, starts, dim**-0.5)
    found = reference_attention.paged_attention(q, inputs)

    def floats(held, scale):
        q = unpack_halves(held) if held.dtype == torch.uint8 else held
        own = scale.float()[..., None] if scale.dim() == 3 else scale.view(1, heads, 1, -1)
        return q.float() * own

    wide = KVPool(floats(pool.k, pool.k_scale), floats(pool.v, pool.v_scale))
    for x, held in ((k, wide.k), (v, wide.v)):
        seen = held.transpose(1, 2).flatten(0, 1)[:tokens]
        assert (seen - x).square().mean() < 0.05 * x.square().mean()
    wanted = reference_attention.paged_attention(q, replace(inputs, pool=wide))
    assert torch.allclose(found, wanted, atol=1e-5)


def test_an_offset_of_all_keys_changes_no_attention():
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(9, 1, 8, generator=generator) for _ in "kv")
    q, offset = torch.randn(9, 2, 8, generator=generator), torch.linspace(-2, 2, 8)[None]
    found = []
    for own in (None, offset):
        pool = KVPool(torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 64, 8), k_offset=own)
        reference.write_kv(k, v, pool, torch.arange(9))
        tables, lengths, starts = map(torch.tensor, ([[0]], [9], [0, 9]))
        inputs = AttentionInputs(pool, tables, lengths, starts, 0.4)
        found.append(reference_attention.paged_attention(q, inputs))
    assert torch.allclose(*found, atol=1e-5)
