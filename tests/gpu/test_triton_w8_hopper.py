"""W8A8 times many rows on Hopper: integers exactly, fp8 within bounds of fp64, the same bits."""

from __future__ import annotations

import pytest
import torch

import kernels.reference as reference

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an sm_90 GPU",
    ),
    pytest.mark.usefixtures("poison"),
]
if torch.cuda.is_available():
    import kernels.triton.reference as twins
    from kernels.bench.case import relative
    from kernels.triton.linear.w8a8 import pack_w8a8
    from kernels.triton.tuning import Tile

    TILES = [
        Tile(*cut, 8, True)
        for cut in (
            (128, 256, 1, 4),
            (256, 128, 1, 4),
            (128, 128, 1, 6),
            (256, 64, 1, 4),
            (128, 64, 1, 8),
        )
    ]
FP8 = torch.float8_e4m3fn

# Rows below, at and above a tile; whole rounds and a rest; runs of one group and more.
# Outputs that are whole tiles, and 64 less.
SHAPES = (
    (65, 256, 1408), (200, 1024, 2048), (1000, 768, 512), (128, 6144, 384), (1100, 9216, 256),
    (300, 960, 640), (70, 576, 1536),
)  # fmt: skip


def fits(outputs, tile):
    return outputs % tile.outputs in (0, tile.outputs - 64)


def layer(rows, outputs, inputs, dtype, with_bias):
    """x, q, scales, bias."""
    x, q = (torch.randn(n, inputs, device="cuda") for n in (rows, outputs))
    if dtype == torch.int8:
        x, q = ((t * 60).clamp(-127, 127) for t in (x, q))
    bias = torch.randn(outputs, device="cuda") if with_bias else None
    return x.to(dtype), q.to(dtype), torch.rand(outputs, device="cuda") * 0.01, bias


@pytest.mark.parametrize(
    ("dtype", "with_bias", "per_row"),
    [(torch.bfloat16, False, True), (torch.float16, True, False), (torch.float32, True, True)],
)
def test_int8_equals_its_twin_bit_for_bit(dtype, with_bias, per_row, workspace):
    for rows, outputs, inputs in SHAPES:
        x, q, scale, bias = layer(rows, outputs, inputs, torch.int8, with_bias)
        scale = scale * 1e-2
        weight = pack_w8a8(q, scale, bias)
        own = torch.rand(rows, 1, device="cuda") if per_row else torch.tensor([0.03]).cuda()
        wanted = (x.double() @ q.double().T).float() * (own * scale)
        wanted = (wanted if bias is None else wanted + bias).to(dtype)
        for tile in (None, *(t for t in TILES if fits(outputs, t))):
            got = weight.run(x, own, workspace, dtype, tile=tile)
            assert torch.equal(got, wanted), (rows, outputs, inputs, tile)
            sums = weight.run(x, own, workspace, torch.int32, tile=tile)
            assert torch.equal(sums, (x.double() @ q.double().T).int()), (rows, outputs, tile)
            short = x[:, :-48].contiguous()
            fewer = x * (torch.arange(inputs, device="cuda") < inputs - 48)
            wanted_sums = (fewer.double() @ q.double().T).int()
            assert torch.equal(
                weight.run(short, own, workspace, torch.int32, tile=tile), wanted_sums
            )
        if rows == 65:
            args = (t if t is None else t.cpu() for t in (x, own, q, scale, bias))
            assert torch.equal(got.cpu(), reference.int8_linear(*args, out_dtype=dtype))


@pytest.mark.parametrize(("dtype", "per_row"), [(torch.bfloat16, True), (torch.float32, False)])
def test_fp8_is_within_bounds_of_its_fp64_twin(dtype, per_row, workspace):
    for rows, outputs, inputs in (*SHAPES, (200, 512, 8192), (300, 512, 14336), (70, 256, 28672)):
        x, q, scale, bias = layer(rows, outputs, inputs, FP8, per_row)
        weight = pack_w8a8(q, scale, bias)
        own = torch.rand(rows, 1, device="cuda") if per_row else torch.tensor([0.03]).cuda()
        wanted = twins.scaled_linear(x, own, q, scale, bias)
        for tile in TILES:
            if fits(outputs, tile) and (inputs <= 8192 or tile.rows * tile.outputs <= 2**14):
                got = weight.run(x, own, workspace, dtype, tile=tile)
                assert relative(got, wanted) < 5e-3, (rows, outputs, inputs, tile)
                assert torch.equal(got, weight.run(x, own, workspace, dtype, tile=tile))
        assert relative(weight.run(x, own, workspace, dtype), wanted) < 1e-2


def test_a_graph_replays_what_was_captured(workspace):
    x, q, scale, _ = layer(200, 512, 2048, torch.int8, False)
    weight, one = pack_w8a8(q, scale), torch.ones(1, device="cuda")
    run = lambda: weight.run(x, one, workspace, tile=TILES[1])  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    x.copy_(x.flip(0))
    graph.replay()
    assert torch.equal(out, run())
