"""Weights with scales of groups and zero points on a GPU, W8A16: every kind, few rows and many."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available():
    import kernels.triton.reference as twins
    from kernels.bench import case, gpu_cases
    from kernels.bench.shapes import VARIANTS
    from kernels.triton.linear.w4a8 import pack_w4a8
    from kernels.triton.linear.weight_only import pack_w4a16, pack_w8a16
    from kernels.triton.tuning import Tile

ROWS = (1, 16, 33, 64, 128, 300, 600)
KINDS = [(group, zeros) for group in (32, 64, 128, 256, 1024) for zeros in (False, True)]
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 4e-3}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("base", ["w4a16", "w4a8", "w8a16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_families_equal_their_fp64_twins(base, dtype, workspace):
    for variant in VARIANTS:
        for rows in ROWS:
            for outputs, inputs in ((6144, 4096), (192, 1408)):
                gpu_cases.gemm(base + variant, rows, outputs, inputs, workspace, dtype).check()


@pytest.mark.parametrize(("group", "zeros"), KINDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_weight_only_of_every_kind(bits, group, zeros, workspace):
    pack = pack_w4a16 if bits == 4 else pack_w8a16
    q, scale, zero = case.grouped_weight(bits, 512, 1024, group, zeros)
    bias = torch.randn(512, device="cuda")
    for scales in (scale, scale.half(), scale.bfloat16()):
        weight = pack(q, scales, bias, zero)
        for dtype, bound in BOUNDS.items():
            exact = twins.grouped_weight(q, scales, zero)
            assert case.relative(weight.dequantize(dtype), exact) < bound
            for rows in (1, 16, 70, 600):
                x = torch.randn(rows, 1024, device="cuda").to(dtype)
                wanted = twins.grouped_linear(x, q, scales, bias, None, zero)
                tiles = (None, Tile(128, 16, 3), Tile(64, 64, 1, 3), Tile(128, 128, 1, 3, 8))
                for tile in tiles:
                    got = weight.run(x, None, workspace, dtype, tile=tile)
                    assert case.relative(got, wanted) < bound, (rows, tile, dtype)
    assert not workspace.arrivals.any()


@pytest.mark.parametrize(("group", "zeros"), KINDS)
def test_w4a8_integers_are_exact(group, zeros, workspace):
    q, scale, zero = case.grouped_weight(4, 512, 1024, group, zeros)
    scale = torch.ones_like(scale)
    weight, one = pack_w4a8(q, scale, None, zero), torch.ones(1, device="cuda")
    for rows in (1, 16, 40, 200, 1000):
        x = torch.randint(-127, 128, (rows, 1024), dtype=torch.int8, device="cuda")
        wanted = twins.grouped_linear(x, q, scale, None, None, zero).float()
        for tile in (None, Tile(64, 16, 4), Tile(128, 64, 2), Tile(128, 128, 1, 3, 8)):
            got = weight.run(x, one, workspace, torch.float32, tile=tile)
            assert torch.equal(got, wanted), (rows, tile)


@pytest.mark.parametrize("variant", ["", "_g64", "_zeros"])
def test_many_rows(variant, workspace):
    for base in ("w4a8", "w4a16", "w8a16"):
        for rows in (513, 2048, 8192):
            gpu_cases.gemm(base + variant, rows, 1024, 4096, workspace).check()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_integers(bits, workspace):
    """Zero points and weights at both ends, where a byte or a float could overflow."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    q = torch.full((64, 256), high, dtype=torch.int8, device="cuda")
    q[::2] = low
    zero = torch.full((64, 2), high, dtype=torch.int8, device="cuda")
    zero[:, 1] = low
    scale = torch.full((64, 2), 2.0**-6, device="cuda")
    exact = twins.grouped_weight(q, scale, zero)
    weight = (pack_w4a16 if bits == 4 else pack_w8a16)(q, scale, None, zero)
    for dtype in BOUNDS:
        assert torch.equal(weight.dequantize(dtype).double(), exact)
    if bits == 4:
        x = torch.full((5, 256), 127, dtype=torch.int8, device="cuda")
        x[1::2] = -127
        one = torch.ones(1, device="cuda")
        got = pack_w4a8(q, scale, None, zero).run(x, one, workspace, torch.float32)
        assert torch.equal(got.double(), x.double() @ exact.T)


@pytest.mark.parametrize(("group", "zeros"), KINDS)
def test_weights_of_several_experts_are_packed_as_on_a_cpu(group, zeros):
    for pack, bits in ((pack_w4a16, 4), (pack_w4a8, 4), (pack_w8a16, 8)):
        parts = case.grouped_weight(bits, 3 * 128, 1024, group, zeros)
        q, scale, zero = (None if p is None else p.view(3, 128, -1) for p in parts)
        there = pack(q, scale, None, zero)
        here = pack(q.cpu(), scale.cpu(), None, None if zero is None else zero.cpu())
        for name in ("packed", "scale"):
            assert torch.equal(getattr(there, name).cpu(), getattr(here, name)), name


def test_a_graph_replays_what_was_captured(workspace):
    q, scale, zero = case.grouped_weight(8, 512, 1024, 1024, True)
    weight, x = pack_w8a16(q, scale, None, zero), torch.randn(4, 1024, device="cuda").half()
    weight.run(x, None, workspace, x.dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = weight.run(x, None, workspace, x.dtype)
    x.normal_()
    graph.replay()
    assert torch.equal(out, weight.run(x, None, workspace, x.dtype))
