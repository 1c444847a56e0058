"""GPU linear layers in Triton's interpreter against their twins: every cut, bias, edge."""

import json
import re

import pytest
import torch

import kernels.reference as reference
import kernels.triton.reference as twins
from kernels.triton import tuning
from kernels.triton.common import Workspace
from kernels.triton.linear import w16a16
from kernels.triton.linear.launch import fitting
from kernels.triton.linear.w4a8 import pack_w4a8
from kernels.triton.linear.w8a8 import pack_w8a8
from kernels.triton.linear.weight_only import pack_w4a16
from kernels.triton.tuning import Tile, rule
from tests.kernels.triton_lab import distance, interpreted
from tests.refusals import refused

OUTPUTS, INPUTS = 128, 512


def random(rows: int, bits: int, with_bias: bool, outputs: int = OUTPUTS):
    """x int8, weight, its scales (of groups if 4 bits), bias."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-127, 128, (rows, INPUTS), generator=generator, dtype=torch.int8)
    low, high = (-8, 8) if bits == 4 else (-127, 128)
    q = torch.randint(low, high, (outputs, INPUTS), generator=generator, dtype=torch.int8)
    shape = (outputs, INPUTS // 128) if bits == 4 else (outputs,)
    scale = torch.rand(shape, generator=generator) * 0.01 + 0.005
    bias = torch.randn(outputs, generator=generator) if with_bias else None
    return x, q, scale, bias


@pytest.mark.parametrize(
    ("cut", "with_bias"), [((128, 16, 3), True), ((64, 64, 1), False), ((64, 128, 2), True)]
)
@interpreted
def test_w4a16(cut, with_bias):
    workspace = Workspace.on("cpu", 1 << 18, 64)
    for rows in (1, 17):
        x, q, scale, bias = random(rows, 4, with_bias)
        x, scale = (x.float() / 50).half(), scale.half()
        weight = pack_w4a16(q, scale, bias)
        assert weight.nbytes == q.numel() // 2 + scale.nbytes + (4 * OUTPUTS if with_bias else 0)
        got = weight.run(x, None, workspace, x.dtype, tile=Tile(*cut))
        assert distance(got, twins.grouped_linear(x, q, scale, bias)) < 6e-4
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("cut", [(64, 16, 1), (128, 16, 3), (64, 64, 1, 2)])
@pytest.mark.parametrize(("per_row", "with_bias"), [(False, True), (True, False)])
@pytest.mark.parametrize("bits", [4, 8])
@interpreted
def test_products_of_integers(bits, cut, per_row, with_bias):
    """Of eight bits they equal their twin's bit for bit."""
    workspace = Workspace.on("cpu", 1 << 18, 64)
    for rows in (1, 17, 70):
        x, q, scale, bias = random(rows, bits, with_bias)
        if bits == 8:
            q[0], x[0] = -128, 127  # the former is one of others' checkpoints
        own = torch.rand(rows, 1) if per_row else torch.tensor([0.3])
        weight = (pack_w8a8 if bits == 8 else pack_w4a8)(q, scale, bias)
        got = weight.run(x, own, workspace, torch.float32, tile=Tile(*cut))
        if bits == 8:
            assert torch.equal(got, reference.int8_linear(x, own, q, scale, bias))
        else:
            assert distance(got, twins.grouped_linear(x, q, scale, bias, own)) < 1e-6
    assert weight.run(x[:0], own[:1], workspace).shape == (0, OUTPUTS)


@interpreted
def test_fp8():
    x, q, scale, bias = random(9, 8, True)
    x, q = (t.float().div(40).to(torch.float8_e4m3fn) for t in (x, q))
    own, workspace = torch.rand(9, 1), Workspace.on("cpu", 1 << 18, 64)
    for inputs in (512, 384):
        xs, qs = x[:, :inputs].contiguous(), q[:, :inputs].contiguous()
        weight = pack_w8a8(qs, scale, bias)
        got = weight.run(xs, own, workspace, torch.float32, tile=Tile(64, 16, 3))
        assert distance(got, twins.scaled_linear(xs, own, qs, scale, bias)) < 1e-6


@pytest.mark.parametrize("generation", [80, 90])
@interpreted
def test_w16a16(generation):
    workspace = Workspace.on("cpu", 1 << 18, 64)
    tiles = (None, Tile(64, 16, 3, 2), Tile(64, 8, 1, 2, 4, False, 256))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(w16a16, "capability", lambda: generation)  # by pointers, by TMA
        sizes = ((128, 512), (192, 1280), (32, 360), (180, 576), (64, 256))
        for rows, (outputs, inputs) in zip((3, 20, 1, 17, 40), sizes, strict=True):
            x, w = (torch.randn(n, inputs).half() for n in (rows, outputs))
            bias = torch.randn(outputs).half()
            for own, tile in zip((bias, None, bias, bias), (*tiles, w16a16.GEMV), strict=True):
                weight = w16a16.DenseWeight(w, own)
                tile = tile or weight.few_rows_tile(x)
                got = weight.run(x, None, workspace, torch.float32, tile=tile)
                assert distance(got, twins.float_linear(x, w, own)) < 1e-6
                assert not workspace.arrivals.any()
        patch.setattr(w16a16.DenseWeight, "_few", lambda weight, x: True)  # as on a GPU
        for rows, outputs, small in ((1, 3072, 1), (1, 3136, 0), (4, 256, 1), (5, 256, 0)):
            own = w16a16.DenseWeight(torch.empty(outputs, 8192).half(), None)
            assert (own.tile(torch.empty(rows, 8192).half(), w.dtype, None) == w16a16.GEMV) == small
    weight, tile = w16a16.DenseWeight(w, None), Tile(64, 16)
    assert weight.run(x, None, workspace, torch.float16, tile=tile).dtype == torch.float16
    assert weight.run(x[:0], None, workspace, tile=tile).shape == (0, 64)
    assert weight.tile(x, torch.float16, None) is None, "no GPU"
    misfits = [
        (x, w[:, :252].contiguous(), "K in 8s"),
        (x.float(), w, "contiguous float16"),
        (x, w.float(), "[N, K]"),
        (x, w.T.contiguous().T, "contiguous float16"),
        (x[:, :128].contiguous(), w, "128 inp"),
    ]
    for bad, values, message in misfits:
        with pytest.raises(ValueError, match=re.escape(message)):
            w16a16.DenseWeight(values, None).run(bad, None, workspace, tile=tile)


def integers(*shape: int, top: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-top, top + 1, shape, generator=generator, dtype=torch.int8)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.long() @ weight.long().T).to(torch.int32)


@pytest.mark.parametrize("cut", [(64, 16, 1), (128, 16, 3)])
@interpreted
def test_integer_sums_of_w8a8(cut):
    workspace, bias = Workspace.on("cpu", 1 << 18, 64), torch.full((OUTPUTS,), 1e9)
    q, scale = integers(OUTPUTS, INPUTS, top=127), torch.rand(OUTPUTS)
    q[0] = -128
    weight = pack_w8a8(q, scale, bias)
    assert torch.equal(weight.output_scale, scale)
    for rows in (1, 17):
        x = integers(rows, INPUTS, top=127)
        got = weight.run(x, torch.rand(1), workspace, torch.int32, tile=Tile(*cut))
        assert got.dtype == torch.int32
        assert torch.equal(got, product(x, q))


@pytest.mark.parametrize("groups", [1, 4, 16])
@interpreted
def test_integer_sums_of_weights_of_two_levels(groups):
    """Of whole rows, of which 16 times the sum is formed, and with multipliers of groups."""
    workspace, unit = Workspace.on("cpu", 1 << 18, 64), torch.full((OUTPUTS, 1), 2.0**-10)
    q, multiples = integers(OUTPUTS, INPUTS, top=7), torch.ones(OUTPUTS, 1)
    if groups > 1:
        multiples = (integers(OUTPUTS, groups, top=7) + 9).float()
        multiples[:, :2] = torch.tensor([15.0, 16.0])
    weight = pack_w4a8(q, unit * multiples, torch.ones(OUTPUTS))
    assert torch.equal(weight.output_scale, unit[:, 0])
    x = integers(5, INPUTS, top=127)
    wide = multiples.repeat_interleave(INPUTS // groups, 1) * q
    got = weight.run(x, torch.rand(1), workspace, torch.int32)
    assert torch.equal(got, product(x, wide))


@interpreted
def test_other_weights_have_no_integer_sums():
    q, ordinary = integers(OUTPUTS, INPUTS, top=7), 1 + torch.rand(OUTPUTS, 4)
    workspace, one = Workspace.on("cpu", 1 << 18, 64), torch.ones(1)
    weight = pack_w4a8(q, ordinary)
    assert not weight.exact
    x = integers(5, INPUTS, top=7)
    refused("those of w4a8 are not", weight.run, x, one, workspace, torch.int32)
    with pytest.raises(ValueError, match="sums of w4a8 are not of integers alone"):
        weight.output_scale  # noqa: B018
    exact = pack_w8a8(q, ordinary[:, 0])
    refused("torch.int8 is asked for.* of w8a8 are", exact.run, x, one, workspace, torch.int8)


@interpreted
def test_what_does_not_fit_is_refused():
    workspace = Workspace.on("cpu", 1 << 18, 64)
    x, q, scale, _ = random(3, 4, False)
    for pack in (pack_w4a16, pack_w4a8):
        refused("N in 64s", pack, q[:100], scale[:100])
        refused(r"outside of \[-8, 7\]", pack, q + 3, scale)
        refused("one for each group", pack, q, scale[:, :3])
    half, four, eight = pack_w4a16(q, scale), pack_w4a8(q, scale), pack_w8a8(q, scale[:, 0])
    one, small = torch.ones(1), Workspace.on("cpu", 100, 1)
    refused("float16 or bfloat16", half.run, x.float(), None, workspace, torch.float32)
    refused("256 inputs, the weight 512", four.run, x[:, :256].contiguous(), one, workspace)
    refused("2 scales for 3 rows", four.run, x, torch.ones(2), workspace)
    refused("multiple of 256", eight.run, x, one, workspace, tile=Tile(256, 16))
    refused("make a larger one", eight.run, x, one, small, tile=Tile(64, 16, 2))
    refused("contiguous int8", eight.run, x.float(), one, workspace)


@interpreted
def test_stages_are_left_out_only_where_memory_is_small():
    """On Hopper no tile of the rule or of its table changes with the groups of a weight."""
    table = json.loads((tuning.FOLDER / "NVIDIA_H100_80GB_HBM3.json").read_text())
    families = {"w4a16": (64, 256), "w8a16": (128, 256), "w4a8": (64, 128)}
    families["w4a8_two_level"] = families["w4a8"]
    for family, sizes in families.items():
        tiles = {
            rule(family, processors, rows, outputs, 4096)
            for processors in (1, 132)
            for rows in (1, 32, 64, 512)
            for outputs in (64, 4096, 28672)
        }
        measured = [entry for shape in table.get(family, {}).values() for entry in shape.values()]
        for tile in tiles | {Tile(**entry) for entry in measured}:
            spread = 128 * tile.outputs if family == "w4a8" else 0
            for group in (0, 32, 64, 128):
                assert fitting(tile, *sizes, group, 232448 - spread) == tile
                small = fitting(tile, *sizes, group, 101376 - spread)
                assert 1 < small.stages <= tile.stages
