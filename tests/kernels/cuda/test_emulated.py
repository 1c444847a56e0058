"""A block in one kernel, run without a device: its numbers, and the same bits in any order of threads.

What a device alone shows (instructions, registers, times) is tested by `tests/gpu`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (it is in the `test` extra)")
from inference.gpu.fused import FusedLayers
from kernels.bench.case import relative
from kernels.cuda.attention import attention_shape
from kernels.cuda.fused_block import FusedBlocks
from tests.kernels.cuda.blocks import EPS, Heads, Integers, Mixture, draw, expected, in_int8

pytestmark = [pytest.mark.usefixtures("processors"), pytest.mark.ci]  # seconds each
unevenly = pytest.mark.parametrize("processors", [8, 7], indirect=True)  # 7 share nothing evenly
CPU = torch.device("cpu")
SHAPE = 1024, 1280, 1408, 1984  # no size like another
# (channels, inputs of down, KV heads, queries of each, channels of a head, bits of the cache,
# lengths of the sequences, whether q and k are normed and keys are centred)
ATTENTIONS = {
    "int8": (1024, 1024, 4, 4, 64, 8, [200], False),
    "centred int8, a row of nothing": (1024, 1024, 1, 8, 128, 8, [130, 0], True),
    "bf16, several turns": (1024, 1152, 1, 8, 128, 16, [65, 700], True),
}


def run(blocks, weights, x, x_scale, residual, *rest):
    """What a launch gives: the same bits in any order of threads, whatever a launch before it left."""
    given, others = ((weights, x, x_scale, own, *rest) for own in (residual, -residual))
    found, other = blocks.run(*given), blocks.run(*others)
    for again, first in ((others, other), (given, found)):  # in the places of the other rows
        assert all(map(torch.equal, blocks.run(*again), first))
    return found


def check(found, wanted, *bounds):
    for one, other, bound in zip(found, wanted, bounds, strict=True):
        assert relative(one, other) < bound


@unevenly
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_block_equals_its_products_in_fp64(rows, zeros):
    weights, plain, biases = draw(SHAPE, "cpu", zeros=zeros, bias=zeros)
    x, residual = (torch.randn(rows, n).bfloat16() for n in SHAPE[:2])
    blocks = FusedBlocks(weights.shape, rows, CPU)
    found = run(blocks, weights, x, None, residual, EPS)
    check(found, expected(weights, plain, biases, x, residual), 4e-3, 8e-3)


@unevenly
@pytest.mark.parametrize("kind", ["by token", "static", "sinks"])
def test_a_block_of_integers_equals_its_products(kind):
    own = Integers(SHAPE, 2, kind, "cpu")
    blocks = FusedBlocks(own.weights.shape, 2, CPU)
    found = run(blocks, own.weights, *own.given, own.residual, EPS, own.sinks)
    check(found, own.expected(), 2e-3, 4e-3)


@pytest.mark.parametrize("normalized", [True, False])
def test_a_mixture_equals_its_products_in_fp64(normalized):
    own = Mixture((1024, 1024, 512, 1536, 20, 4), "cpu", normalized=normalized)
    x, residual = torch.randn(1, 1024).bfloat16(), torch.randn(1, 1024).bfloat16()
    blocks = FusedBlocks(own.weights.shape, 1, CPU)
    found = run(blocks, own.weights, x, None, residual, EPS)
    check(found, own.expected(x, residual), 4e-3, 8e-3)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_block_with_its_attention_equals_it_in_fp64(name):
    hidden, inner, kv, queries, dim, *rest = ATTENTIONS[name]
    own = Heads(hidden, kv, queries, dim, *rest, "cpu")
    shape = kv * queries * dim, hidden, inner, (queries + 2) * kv * dim
    weights, plain, biases = draw(shape, "cpu")
    assert weights.shape is not None
    heads = attention_shape(own.inputs(own.pools[0]), kv * queries)
    blocks = FusedBlocks(replace(weights.shape, heads=heads), len(own.qkv), CPU)
    found = run(blocks, weights, own.attention(), None, own.residual, EPS)
    wanted = expected(weights, plain, biases, own.expected(), own.residual)
    check(found, wanted, 6e-3, 8e-3)
    assert torch.equal(own.pools[0].k, own.pools[1].k)
    assert torch.equal(own.pools[0].v, own.pools[1].v)


@unevenly
@pytest.mark.parametrize("kind", ["by token", "static"])
def test_a_block_of_integers_with_its_attention_equals_it(kind):
    hidden, inner, kv, queries, dim, *rest = 1024, 1024, 1, 8, 128, 8, [130, 65], True
    heads = Heads(hidden, kv, queries, dim, *rest, "cpu")
    shape = kv * queries * dim, hidden, inner, (queries + 2) * kv * dim
    own = Integers(shape, 2, kind, "cpu")
    own.residual = heads.residual
    own.x = in_int8(heads.expected().float(), own.weights.inputs[0], own.sinks)
    given = replace(own.weights.shape, heads=attention_shape(heads.inputs(heads.pools[0]), queries))
    blocks = FusedBlocks(given, 2, CPU)
    found = run(blocks, own.weights, heads.attention(), None, own.residual, EPS)
    check(found, own.expected(), 3e-2, 4e-2)  # an integer of the rows is another one now and then


@pytest.mark.parametrize("rows", [1, 2])
def test_attention_of_a_token_and_its_draft_is_left_to_single_kernels(rows):
    heads = Heads(1024, 4, 4, 64, 8, [200, 201][:rows], False, "cpu")
    layers = FusedLayers([], torch.bfloat16, CPU)
    layers._blocks = [draw((1024, 1024, 1024, 1536), "cpu")[0]]
    assert layers.attends(0, heads.attention(), None) == (rows == 1)
    assert layers.takes(0, torch.empty(rows, 1024), None)


def test_numbers_that_are_not_finite_go_through_and_do_not_stay():
    weights, *_ = draw(SHAPE, "cpu")
    blocks = FusedBlocks(weights.shape, 1, CPU)
    x, residual = (torch.randn(1, n).bfloat16() for n in SHAPE[:2])
    wanted = blocks.run(weights, x, None, residual, EPS)
    broken = x.clone()
    broken[0, 5] = torch.nan
    assert all(y.isnan().all() for y in blocks.run(weights, broken, None, residual, EPS))
    assert all(map(torch.equal, blocks.run(weights, x, None, residual, EPS), wanted))
