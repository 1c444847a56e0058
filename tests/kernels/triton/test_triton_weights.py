"""Weights with scales of groups and zero points: in the interpreter and compiled, every kind."""

import pytest
import torch

import kernels.reference as reference
import kernels.triton.reference as twins
from kernels.triton.common import Workspace
from kernels.triton.linear.w4a8 import pack_w4a8
from kernels.triton.linear.weight_only import pack_w4a16, pack_w8a16
from kernels.triton.tuning import Tile
from tests.kernels.triton_lab import SHARED, building_for, compiled, distance, fitting, interpreted
from tests.refusals import refused

OUTPUTS, INPUTS = 128, 256
KINDS = [(group, zeros) for group in (32, 64, 128, 256) for zeros in (False, True)]


def random(bits: int, group: int, zeros: bool, outputs: int = OUTPUTS, inputs: int = INPUTS):
    """Integers, scales, zero points or None."""
    generator = torch.Generator().manual_seed(group)
    top = 1 << (bits - 1)
    q, zero = (
        torch.randint(-top, top, (outputs, width), generator=generator, dtype=torch.int8)
        for width in (inputs, inputs // group)
    )
    scale = torch.rand(outputs, inputs // group, generator=generator) * 0.01 + 0.005
    return q, scale, zero if zeros else None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group", "zeros"), KINDS)
@interpreted
def test_weight_only(bits, group, zeros):
    pack = pack_w4a16 if bits == 4 else pack_w8a16
    q, scale, zero = random(bits, group, zeros)
    bias, x = torch.randn(OUTPUTS), torch.randn(3, INPUTS).half()
    weight, workspace = pack(q, scale, bias, zero), Workspace.on("cpu", 1 << 18, 64)
    groups = INPUTS // group if bits == 8 and group == INPUTS else INPUTS // min(group, 128)
    assert weight.nbytes == q.numel() * bits // 8 + 4 * OUTPUTS * (groups + 1)
    wanted = twins.grouped_linear(x, q, scale, bias, None, zero)
    for tile in (Tile(128, 16, 2), Tile(64, 128, 1)):
        assert distance(weight.run(x, None, workspace, x.dtype, tile=tile), wanted) < 6e-4, tile
    assert not workspace.arrivals.any()
    apart = pack(q.t().contiguous().t(), scale, bias, zero)
    assert torch.equal(apart.packed, weight.packed)
    half = scale.half()
    back = pack(q, half, None, zero).dequantize(torch.float16)
    assert torch.equal(back, twins.grouped_weight(q, half, zero).half())


@pytest.mark.parametrize(("group", "zeros"), KINDS)
@interpreted
def test_w4a8(group, zeros):
    q, scale, zero = random(4, group, zeros)
    bias, own = torch.randn(OUTPUTS), torch.rand(3, 1)
    x = torch.randint(-127, 128, (3, INPUTS), dtype=torch.int8)
    weight, workspace = pack_w4a8(q, scale, bias, zero), Workspace.on("cpu", 1 << 18, 64)
    wanted = twins.grouped_linear(x, q, scale, bias, own, zero)
    ones = pack_w4a8(q, torch.ones_like(scale), None, zero)
    exact = twins.grouped_linear(x, q, torch.ones_like(scale), None, None, zero).float()
    for tile in (Tile(128, 16, 2), Tile(64, 64, 1)):
        got = weight.run(x, own, workspace, torch.float32, tile=tile)
        assert distance(got, wanted) < 1e-6, tile
        got = ones.run(x, torch.ones(1), workspace, torch.float32, tile=tile)
        assert torch.equal(got, exact), tile


def two_levels(group: int, outputs: int = OUTPUTS, inputs: int = INPUTS):
    """Integers and scales, and what the scales are: units and multiples, both ends among them."""
    q, scale, _ = random(4, group, False, outputs, inputs)
    m = (scale * 1e4).to(torch.int32) % 16 + 1
    m[:, :1], m[:, 1:2], q[:, ::3] = 15, 16, -8  # coprime: the unit is the largest that there is
    if group == inputs:
        m[:] = 1
    unit = 2.0 ** (torch.arange(outputs) % 7 - 9) * (8 + torch.arange(outputs) % 8)
    return q, unit[:, None] * m, unit, m


@pytest.mark.parametrize(
    ("group", "dtype"),
    [(32, torch.bfloat16), (64, torch.float16), (128, torch.float32), (256, torch.bfloat16)],
)
@interpreted
def test_w4a8_of_two_levels_equals_its_twin_bit_for_bit(group, dtype):
    for inputs in (INPUTS, 512, 640, group):
        if inputs % max(group, 128):
            continue
        q, scale, unit, m = two_levels(group, OUTPUTS, inputs)
        bias, own = torch.randn(OUTPUTS), torch.rand(19, 1)
        x = torch.randint(-127, 128, (19, inputs), dtype=torch.int8)
        weight, workspace = pack_w4a8(q, scale.to(dtype), bias), Workspace.on("cpu", 1 << 18, 64)
        whole = group == inputs
        multiples = 0 if whole else inputs // min(group, 128) * OUTPUTS
        assert weight.nbytes == q.numel() // 2 + 8 * OUTPUTS + multiples
        assert weight.size == (OUTPUTS, inputs)
        product = (q * m.repeat_interleave(group, 1)).to(torch.int8)
        wanted = reference.int8_linear(x, own, product, unit, bias)
        for tile in (Tile(128, 16, 2), Tile(64, 64, 1), Tile(64, 16, 3)):
            got = weight.run(x, own, workspace, torch.float32, tile=tile)
            assert torch.equal(got, wanted), tile
    assert not workspace.arrivals.any()


@interpreted
def test_other_scales_are_not_of_two_levels():
    q, scale, _, m = two_levels(64)
    assert pack_w4a8(q, scale).unit is not None
    zero = torch.zeros_like(m, dtype=torch.int8)
    assert pack_w4a8(q, scale, None, zero).unit is None
    scale[5, 1] *= 1.01
    weight = pack_w4a8(q, scale)
    assert weight.unit is None
    assert (weight.family, weight.group) == ("w4a8", 64)
    long = torch.zeros(64, 1 << 17, dtype=torch.int8)  # inputs whose sum could leave an int32
    assert pack_w4a8(long, torch.ones(64, 1)).unit is None


@interpreted
def test_what_does_not_fit_is_refused():
    q, scale, zero = random(4, 64, True)
    for pack in (pack_w4a16, pack_w4a8, pack_w8a16):
        for groups in (3, 16):
            refused("one for each group of 32, 64 or", pack, q, scale[:, :1].expand(-1, groups))
        refused("one for each scale", pack, q, scale, None, zero[:, :2])
        refused("one for each scale", pack, q, scale, None, zero.int())
        refused(r"bias is \(5,\)", pack, q, scale, torch.zeros(5))
    for pack in (pack_w4a16, pack_w4a8):
        refused(r"zero point has values outside of \[-8, 7\]", pack, q, scale, None, zero - 8)
    weight, x = pack_w8a16(q, scale), torch.zeros(1, INPUTS)
    others = None, Workspace.on("cpu", 1 << 18, 64), torch.float16
    refused("float16 or bfloat16", weight.run, x, *others)
    refused("128 inputs, the weight 256", weight.run, x[:, :128].half(), *others)


@pytest.mark.parametrize("capability", [80, 89, 90])
@compiled
def test_compiled(capability):
    """Operands through registers alone: no shuffles of bytes, nothing stored but the result."""
    hopper, workspace = capability == 90, Workspace.on("cpu", 1 << 18, 64)
    product = r"wgmma\.mma_async\S*{}" if hopper else r"mma\.sync\S*{}"
    few, many = (Tile(128, 16, 1, 5), Tile(128, 64, 1, 4)) if hopper else [Tile(64, 16, 1, 3)] * 2
    half, wide = torch.zeros(3, 1024).half(), torch.zeros(3, 1024).bfloat16()
    integers, one = half.to(torch.int8), torch.ones(1)

    def weight(pack, group, zeros):
        q, scale, zero = random(4, group, zeros, 256, 1024)
        return pack(q, scale, None, zero)

    calls = [
        ("bf16", lambda w: w.run(wide, None, workspace, tile=few), weight(pack_w4a16, 128, True)),
        ("bf16", lambda w: w.run(wide, None, workspace, tile=few), weight(pack_w8a16, 1024, True)),
        ("f16", lambda w: w.run(half, None, workspace, tile=many), weight(pack_w8a16, 1024, False)),
        ("s8", lambda w: w.run(integers, one, workspace, tile=few), weight(pack_w4a8, 64, True)),
        ("s8", lambda w: w.run(integers, one, workspace, tile=few), pack_w4a8(*two_levels(128, 256, 1024)[:2])),
    ]  # fmt: skip
    if hopper:
        calls += [
            ("s8", lambda w: w.run(integers, one, workspace, tile=few), pack_w4a8(*two_levels(32, 256, 1024)[:2])),
            ("f16", lambda w: w.run(half, None, workspace, tile=few), weight(pack_w4a16, 64, True)),
            ("f16", lambda w: w.run(half, None, workspace, tile=many), weight(pack_w4a16, 64, False)),
            ("s8", lambda w: w.run(integers, one, workspace, tile=few), weight(pack_w4a8, 32, False)),
            ("", lambda w: w.dequantize(torch.float16), weight(pack_w4a16, 32, True)),
            ("", lambda w: w.dequantize(torch.bfloat16), weight(pack_w8a16, 64, True)),
        ]  # fmt: skip
    for kind, call, packed in calls:
        with building_for(capability) as built:
            call(packed)
        (binary,) = fitting(built, shared=SHARED if hopper else 101376)
        assert not kind or binary.count(product.format(rf"{kind}\.{kind}")), kind
        if hopper and kind:
            assert binary.count(r"st\.shared|stmatrix") <= 16, "the result's alone"
            assert binary.count(r"wgmma\.mma_async\S* +\{[^}]*\}, *\{"), "left from registers"
        if hopper and kind == "s8":
            assert binary.count("prmt") <= 32, "of zero points alone"
