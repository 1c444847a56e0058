"""4-bit weights times many rows on Hopper: within bounds of fp64, nothing left out, same bits."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an sm_90 GPU",
    ),
    pytest.mark.usefixtures("poison"),
]
if torch.cuda.is_available():
    import kernels.triton.reference as twins
    from kernels.bench.case import relative, two_level_scale
    from kernels.triton.linear.w4a8 import pack_w4a8
    from kernels.triton.linear.weight_only import pack_w4a16
    from kernels.triton.tuning import Tile
    from kernels.two_level import two_level

    TILES = {
        "w4a16": (
            Tile(256, 128, 1, 4, 8, True), Tile(128, 128, 4, 4, 8, True),
            Tile(128, 256, 1, 6, 8, True), Tile(128, 256, 4, 5, 8, True),
            Tile(128, 64, 4, 6, 8, True),
        ),
        "w4a8": (Tile(256, 128, 1, 5, 8, True), Tile(128, 64, 4, 6, 8, True)),
        "w4a8_two_level": (
            Tile(256, 128, 4, 5, 8, True), Tile(128, 256, 1, 4, 8, True),
            Tile(128, 256, 4, 4, 8, True), Tile(128, 64, 4, 6, 8, True),
            Tile(64, 16, 2, 4), Tile(128, 64, 1, 4), Tile(64, 128, 1, 3, 4),
        ),
    }  # fmt: skip


def layer(outputs, inputs, scale_type=torch.float32):
    q = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8, device="cuda")
    scale = torch.rand(outputs, inputs // 128, device="cuda") * 0.01 + 0.002
    return q, scale.to(scale_type), torch.randn(outputs, device="cuda")


# Rows below, at and above a tile; whole rounds and a rest; runs of one group and more.
SHAPES = ((33, 512, 1408), (300, 1024, 2048), (128, 6144, 384), (1100, 9216, 256))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_w4a16_equals_its_fp64_twin(dtype, workspace):
    for rows, outputs, inputs in SHAPES:
        parts = layer(outputs, inputs, dtype if rows == 33 else torch.float32)
        weight = pack_w4a16(*parts)
        x = torch.randn(rows, inputs, device="cuda").to(dtype)
        wanted = twins.grouped_linear(x, *parts)
        for tile in (None, *TILES["w4a16"]):
            got = weight.run(x, None, workspace, x.dtype, tile=tile)
            bound = 1e-3 if dtype == torch.float16 else 4e-3
            assert relative(got, wanted) < bound, (rows, tile)
            assert torch.equal(got, weight.run(x, None, workspace, x.dtype, tile=tile))
            assert not workspace.arrivals.any()


def test_w4a8_equals_its_fp64_twin(workspace):
    for rows, outputs, inputs in SHAPES:
        parts = layer(outputs, inputs)
        weight = pack_w4a8(*parts)
        x = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8, device="cuda")
        for own in (torch.rand(rows, 1, device="cuda") * 0.01, torch.tensor([0.03]).cuda()):
            wanted = twins.grouped_linear(x, *parts, own)
            for tile in (None, *TILES["w4a8"]):
                got = weight.run(x, own, workspace, torch.bfloat16, tile=tile)
                assert relative(got, wanted) < 4e-3, (rows, tile)
                assert not workspace.arrivals.any()


@pytest.mark.parametrize("group", [32, 64, 128, 0])
def test_w4a8_of_two_levels_equals_its_twin_bit_for_bit(group, workspace):
    for rows, outputs, inputs in ((1, 512, 1408), *SHAPES):
        q, _, bias = layer(outputs, inputs)
        scale = two_level_scale(outputs, inputs // (group or inputs))
        unit, m = two_level(scale)
        weight = pack_w4a8(q, scale.bfloat16(), bias)
        assert weight.multipliers == (128 // group if group else 0)
        product = (q * m.repeat_interleave(inputs // m.shape[1], 1)).double()
        x = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8, device="cuda")
        own = torch.rand(rows, 1, device="cuda") if group else torch.full((1,), 0.3).cuda()
        exact = (x.double() @ product.T).float()
        wanted = (exact * (own * unit) + bias).bfloat16()
        tiles = TILES["w4a8_two_level"]
        for tile in tiles if group == 128 else tiles[:5:2]:  # both kernels
            if outputs % tile.outputs == 0 and (tile.splits == 1 or outputs * rows < 4e6):
                got = weight.run(x, own, workspace, torch.bfloat16, tile=tile)
                assert torch.equal(got, wanted), (rows, tile)
                sums = weight.run(x, own, workspace, torch.int32, tile=tile)
                assert torch.equal(sums.float(), exact), (rows, tile)
                assert not workspace.arrivals.any()
        assert torch.equal(weight.run(x, own, workspace), wanted)


def test_a_graph_replays_what_was_captured(workspace):
    parts = layer(512, 2048)
    weight, x = pack_w4a16(*parts), torch.randn(200, 2048, device="cuda").half()
    run = lambda: weight.run(x, None, workspace, x.dtype, tile=TILES["w4a16"][-1])  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    x.normal_()
    graph.replay()
    assert relative(out, twins.grouped_linear(x, *parts)) < 1e-3
