"""fp8 in blocks of 128 in Triton's interpreter against its twin; what it becomes; cuBLASLt's call."""

from dataclasses import replace

import pytest
import torch

import kernels.triton.reference as twins
from kernels.triton import common
from kernels.triton.common import Workspace
from kernels.triton.linear import fp8_block
from kernels.triton.linear.fp8_block import pack_fp8_block
from kernels.triton.tuning import Tile
from tests.kernels.triton_lab import building_for, compiled, distance, fitting, interpreted
from tests.refusals import refused

FP8 = torch.float8_e4m3fn


def random(rows: int, outputs: int, inputs: int):
    """x e4m3 and its scales, weight and its scales, bias."""
    generator = torch.Generator().manual_seed(rows + outputs + inputs)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 3).to(FP8)

    runs, tiles = -(-inputs // 128), -(-outputs // 128)
    x, x_scale = normal(rows, inputs), rand(rows, runs) + 0.01
    return x, x_scale, normal(outputs, inputs), rand(tiles, runs) + 0.01, rand(outputs)


@pytest.mark.parametrize("before_ada", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "cut"),
    [(1, 256, 512, (256, 16, 2)), (17, 136, 384, (64, 16, 2)), (70, 128, 208, (128, 64, 1))],
)
@interpreted
def test_equals_its_twin(rows, outputs, inputs, cut, before_ada):
    """Tiles of two blocks and of half one, edges of outputs, inputs and rows, splits."""
    workspace = common.Workspace.on("cpu", 1 << 16, 64)
    x, x_scale, q, scale, bias = random(rows, outputs, inputs)
    bias = None if before_ada else bias
    weight = fp8_block.pack_fp8_block(q, scale, bias)
    with pytest.MonkeyPatch.context() as patch:
        for module in (common, fp8_block):
            patch.setattr(module, "capability", lambda: 80 if before_ada else 90)
        got = weight.run(x, x_scale, workspace, torch.float32, tile=Tile(*cut))
    wanted = twins.fp8_block_linear(x, x_scale, q, scale, bias)
    assert got.shape == (rows, outputs)
    assert distance(got, wanted) < 1e-6
    assert not workspace.arrivals.any()


@interpreted
def test_every_e4m3_is_exact_before_ada():
    bits = torch.arange(256, dtype=torch.uint8)
    x = (bits * (bits & 127 != 127)).view(FP8).reshape(2, 128)  # without NaN
    weight = fp8_block.pack_fp8_block(torch.eye(128).to(FP8), torch.ones(1, 1))
    with pytest.MonkeyPatch.context() as patch:
        for module in (common, fp8_block):
            patch.setattr(module, "capability", lambda: 80)
        got = weight.run(x, torch.ones(2, 1), common.Workspace.on("cpu", 1, 1), torch.float32, tile=Tile(64, 16))  # fmt: skip
    assert torch.equal(got, x.float())


@interpreted
def test_what_does_not_fit_is_refused():
    workspace = Workspace.on("cpu", 1 << 10, 64)
    x, x_scale, q, scale, _ = random(3, 128, 256)
    refused("K in 16s", pack_fp8_block, q[:, :250], scale)
    refused("K in 16s", pack_fp8_block, q.float(), scale)
    refused(r"each block of 128 x 128, \(1, 2\)", pack_fp8_block, q, scale[:, :1])
    refused(r"bias is \(1,\); needed is \(128,\)", pack_fp8_block, q, scale, torch.ones(1))
    weight = pack_fp8_block(q, scale)
    assert weight.nbytes == q.numel() + 4 * 4
    refused("contiguous float8_e4m3fn", weight.run, x.float(), x_scale, workspace)
    refused("128 inputs, the weight 256", weight.run, x[:, :128].contiguous(), x_scale, workspace)
    refused(r"each run of 128, fp32 \(3, 2\)", weight.run, x, x_scale[:, :1], workspace)
    refused("multiple of 256", weight.run, x, x_scale, workspace, tile=Tile(256, 16))
    refused("make a larger one", weight.run, x, x_scale, workspace, tile=Tile(64, 16, 2))


@pytest.mark.parametrize("rows", [128, 131])
@pytest.mark.parametrize("inputs", [128, 384, 512])
def test_the_library_is_called_as_it_wants(rows, inputs):
    """Fake tensors, whose implementation in torch checks shapes and strides of scales."""
    x, x_scale, q, scale, _ = random(rows, 256, inputs)
    weight = pack_fp8_block(q, scale)
    weight = replace(weight, packed=weight.packed.to("meta"), scale=weight.scale.to("meta"))
    for own in (x_scale, x_scale.t().contiguous().t()):
        out = weight.by_library(x.to("meta"), own.to("meta"), torch.bfloat16)
        assert (out.shape, out.dtype) == ((rows, 256), torch.bfloat16)


@pytest.mark.parametrize("capability", [80, 89, pytest.param(90, marks=pytest.mark.every_triton)])
@compiled
def test_compiled(capability):
    workspace = Workspace.on("cpu", 1 << 22, 64)
    weight = pack_fp8_block(torch.zeros(512, 1024).to(FP8), torch.ones(4, 8))
    tiles = [(16, Tile(128, 16, 2, 4)), (128, Tile(128, 128, 1, 3, 8))]
    if capability == 90:
        tiles += [(16, Tile(256, 16, 1, 4)), (64, Tile(128, 64, 1, 3)), (64, Tile(64, 64, 1, 4))]
    for rows, tile in tiles:
        x, x_scale = torch.zeros(rows, 1024).to(FP8), torch.ones(8, rows).t()
        with building_for(capability) as built:
            weight.run(x, x_scale, workspace, tile=tile)
        (binary,) = fitting(built, shared=232448 if capability == 90 else 101376)
        product = {80: r"mma\.sync\S*f16\.f16", 89: r"mma\.sync\S*e4m3\.e4m3"}.get(
            capability, r"wgmma\.mma_async\S*e4m3\.e4m3"
        )
        assert binary.count(product), tile
        assert binary.count(r"cp\.async"), tile
