"""A block in one kernel, run without a device: its numbers, and the same bits in any order of threads.

What a device alone shows (instructions, registers, times) is tested by `tests/gpu`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (it is in the `test` extra)")
from inference.gpu.fused import FusedLayers
from kernels.bench.case import relative
from kernels.cuda import fused_block
from kernels.cuda.attention import attention_shape
from kernels.cuda.block_weights import BlockShape
from kernels.cuda.fused_block import FusedBlocks
from kernels.cuda.nvrtc import CompilerMissingError
from tests.kernels.cuda.blocks import (
    EPS,
    Heads,
    Integers,
    Mixture,
    draw,
    draw_dense,
    expected,
    in_int8,
)

pytestmark = [pytest.mark.usefixtures("processors"), pytest.mark.ci]  # seconds each
unevenly = pytest.mark.parametrize("processors", [7, 8], indirect=True)  # 7 share nothing evenly
CPU = torch.device("cpu")
SHAPE = 1024, 1280, 1408, 1984  # no size like another
# (channels, inputs of down, KV heads, queries of each, channels of a head, bits of the cache,
# lengths of the sequences, whether q and k are normed and keys are centred, rows of one sequence)
ATTENTIONS = {
    "int8": (1024, 1024, 4, 4, 64, 8, [200], False),
    "centred int8, a row of nothing": (1024, 1024, 1, 8, 128, 8, [130, 0], True),
    "bf16, several turns": (1024, 1152, 1, 8, 128, 16, [65, 700], True),
    "three rows": (1024, 1024, 2, 8, 64, 8, [129, 0, 200], True),
    "four rows of bf16": (1024, 1152, 1, 8, 128, 16, [64, 1, 700, 65], False),
    "two of a sequence": (1024, 1024, 4, 4, 64, 8, [9, 10], True, 2),
    "three of a sequence, in two turns": (1024, 1152, 1, 8, 128, 16, [70, 320, 321, 322], True, 3),
    "four of a sequence, of two programs": (1024, 1024, 1, 8, 128, 8, [*range(127, 131)], True, 4),
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
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_block_equals_its_products_in_fp64(rows, zeros):
    weights, plain, biases = draw(SHAPE, "cpu", zeros=zeros, bias=zeros)
    x, residual = (torch.randn(rows, n).bfloat16() for n in SHAPE[:2])
    blocks = FusedBlocks(weights.shape, rows, CPU)
    found = run(blocks, weights, x, None, residual, EPS)
    check(found, expected(weights, plain, biases, x, residual), 4e-3, 8e-3)


@unevenly
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_block_of_floats_equals_its_products_in_fp64(rows):
    weights, plain, biases = draw_dense(SHAPE, "cpu", bias=True)
    x, residual = (torch.randn(rows, n).bfloat16() for n in SHAPE[:2])
    blocks = FusedBlocks(weights.shape, rows, CPU)
    found = run(blocks, weights, x, None, residual, EPS)
    check(found, expected(weights, plain, biases, x, residual), 4e-3, 8e-3)


@unevenly
@pytest.mark.parametrize("kind", ["by token", "static", "sinks"])
@pytest.mark.parametrize("rows", [2, 3, 4])
def test_a_block_of_integers_equals_its_products(rows, kind):
    own = Integers(SHAPE, rows, kind, "cpu")
    blocks = FusedBlocks(own.weights.shape, rows, CPU)
    found = run(blocks, own.weights, *own.given, own.residual, EPS, own.sinks)
    check(found, own.expected(), 2e-3, 4e-3)


@pytest.mark.parametrize("normalized", [True, False])
def test_a_mixture_equals_its_products_in_fp64(normalized):
    own = Mixture((1024, 1024, 512, 1536, 20, 4), "cpu", normalized=normalized)
    x, residual = torch.randn(1, 1024).bfloat16(), torch.randn(1, 1024).bfloat16()
    blocks = FusedBlocks(own.weights.shape, 1, CPU)
    found = run(blocks, own.weights, x, None, residual, EPS)
    check(found, own.expected(x, residual), 4e-3, 8e-3)


@pytest.mark.parametrize("drawn", [draw, draw_dense])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_block_with_its_attention_equals_it_in_fp64(name, drawn):
    hidden, inner, kv, queries, dim, *rest = ATTENTIONS[name]
    own = Heads(hidden, kv, queries, dim, *rest[:3], "cpu", *rest[3:])
    shape = kv * queries * dim, hidden, inner, (queries + 2) * kv * dim
    weights, plain, biases = drawn(shape, "cpu")
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
@pytest.mark.parametrize("lengths", [[130, 65], [65, 0, 130], [1, 130, 64, 66]])
def test_a_block_of_integers_with_its_attention_equals_it(lengths, kind):
    hidden, inner, kv, queries, dim, *rest = 1024, 1024, 1, 8, 128, 8, lengths, True
    heads = Heads(hidden, kv, queries, dim, *rest, "cpu")
    shape = kv * queries * dim, hidden, inner, (queries + 2) * kv * dim
    own = Integers(shape, len(lengths), kind, "cpu")
    own.residual = heads.residual
    own.x = in_int8(heads.expected().float(), own.weights.inputs[0], own.sinks)
    given = replace(own.weights.shape, heads=attention_shape(heads.inputs(heads.pools[0]), queries))
    blocks = FusedBlocks(given, len(lengths), CPU)
    found = run(blocks, own.weights, heads.attention(), None, own.residual, EPS)
    check(found, own.expected(), 3e-2, 4e-2)  # an integer of the rows is another one now and then


@unevenly
@pytest.mark.parametrize("kind", ["int4", "int8", "mixture", "with attention"])
def test_the_last_block_ends_with_the_residual_stream(kind, processors):
    heads, x, scale = None, torch.randn(1, 1024).bfloat16(), None
    if kind == "int8":
        own = Integers(SHAPE, 1, "static", "cpu")
        weights, (x, scale) = own.weights, own.given
    elif kind == "mixture":
        if processors == 7:
            return  # whose programs would own outputs of two experts
        weights = Mixture((1024, 1280, 512, 1984, 20, 4), "cpu", normalized=True).weights
    else:
        weights = draw(SHAPE, "cpu")[0]
    if kind == "with attention":
        attention = Heads(1280, 4, 4, 64, 8, [200], False, "cpu")
        weights = draw((1024, 1280, 1408, 1536), "cpu")[0]
        x = attention.attention()
        heads = attention_shape(attention.inputs(attention.pools[0]), 16)
    residual = torch.randn(1, 1280).bfloat16()
    last = replace(weights, qkv=None, norms=weights.norms[:1], inputs=weights.inputs[:3])
    totals = []
    for own in (weights, last):
        blocks = FusedBlocks(replace(own.shape, heads=heads), 1, CPU)
        totals += [blocks.run(own, x, scale, sign * residual, EPS) for sign in (1, -1, 1)]
    assert all(qkv is None for _, qkv in totals[3:])
    assert all(
        torch.equal(own[0], other[0]) for own, other in zip(totals[:3], totals[3:], strict=True)
    )


@pytest.mark.parametrize("drawn", [draw, draw_dense])
def test_numbers_that_are_not_finite_go_through_and_do_not_stay(drawn):
    weights, *_ = drawn(SHAPE, "cpu")
    blocks = FusedBlocks(weights.shape, 1, CPU)
    x, residual = (torch.randn(1, n).bfloat16() for n in SHAPE[:2])
    wanted = blocks.run(weights, x, None, residual, EPS)
    broken = x.clone()
    broken[0, 5] = torch.nan
    assert all(y.isnan().all() for y in blocks.run(weights, broken, None, residual, EPS))
    assert all(map(torch.equal, blocks.run(weights, x, None, residual, EPS), wanted))


def test_maps_of_weights_are_aligned_as_the_source_aligns_them():
    assert fused_block._Arguments.map.offset % 64 == 0


def layers_of(shape):
    """A decoder of one block, whose weights have some shape."""
    layers = FusedLayers([], torch.bfloat16, CPU)
    layers._blocks = [SimpleNamespace(shape=shape)]
    return layers


@pytest.mark.parametrize(
    ("most", "kind"),
    [(4, {}), (4, {"bits": 16}), (4, {"bits": 8}), (1, {"experts": 20, "chosen": 4})],
)
def test_steps_of_as_many_tokens_as_gain_run_in_one_kernel(monkeypatch, most, kind):
    monkeypatch.setattr(fused_block, "CudaKernel", lambda *_: None)  # which takes time to compile
    layers = layers_of(BlockShape(1024, 1024, 512 if "experts" in kind else 1408, 1536, **kind))
    taken = [layers.takes(0, torch.empty(rows, 1024), None) for rows in range(7)]
    assert taken == [1 <= rows <= most for rows in range(7)]


def test_a_shape_that_does_not_fit_is_no_fault_and_a_missing_compiler_is_one(monkeypatch, caplog):
    def missing(*_):
        raise CompilerMissingError("NVRTC is not installed")

    monkeypatch.setattr(fused_block, "CudaKernel", missing)
    caplog.set_level(logging.DEBUG, "ptq.inference")
    for inner in (18944, 1408):
        layers, rows = layers_of(BlockShape(1024, 1024, inner, 1536, bits=16)), torch.empty(2, 1024)
        assert not any(layers.takes(0, rows, None) for _ in range(3))
    (first, size), (second, fault) = [(own.levelname, own.message) for own in caplog.records]
    assert (first, second) == ("DEBUG", "WARNING")
    assert "bytes of shared memory" in size
    assert "steps of 2 tokens: NVRTC is not installed" in fault
