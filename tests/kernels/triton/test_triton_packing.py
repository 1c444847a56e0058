"""Weights of one shape that are packed by one call: byte for byte those of a call each."""

from dataclasses import fields

import pytest
import torch

from kernels.triton.common import Workspace
from kernels.triton.linear.dispatch import pack
from kernels.triton.linear.w4a8 import pack_w4a8
from kernels.triton.linear.w16a16 import DenseWeight
from kernels.triton.linear.weight import InputFormat
from kernels.triton.linear.weight_only import pack_w4a16
from tests.kernels.triton_lab import interpreted
from tests.refusals import refused

EXPERTS, OUTPUTS, INPUTS = 3, 256, 512
FP8 = torch.float8_e4m3fn
CASES = {  # bits, inputs that share a scale, zero points, type of the input
    "w4a16": (4, 128, False, torch.float16),
    "w4a16_g32_zeros": (4, 32, True, torch.float16),
    "w4a16_g256": (4, 256, False, torch.float16),
    "w8a16": (8, INPUTS, False, torch.float16),
    "w8a16_g64_zeros": (8, 64, True, torch.float16),
    "w4a8": (4, 128, False, torch.int8),
    "w4a8_g64_zeros": (4, 64, True, torch.int8),
    "w4a8_two_level_g32": (4, 32, False, torch.int8),
    "w4a8_two_level_g256": (4, 256, False, torch.int8),
    "w4a8_whole": (4, INPUTS, False, torch.int8),
    "w8a8": (8, INPUTS, False, torch.int8),
    "fp8": (8, INPUTS, False, FP8),
    "fp8_block": (8, 128, False, FP8),
    "dense": (8, 128, True, torch.int8),
}


def weights(bits: int, group: int, zeros: bool, dtype: torch.dtype, two_level: bool):
    """q [E, N, K], scales and zero points [E, N, groups], biases [E, N]; of types of each kind."""
    generator, top = torch.Generator().manual_seed(group), 1 << (bits - 1)
    shape, of_groups = (EXPERTS, OUTPUTS, INPUTS), (EXPERTS, OUTPUTS, INPUTS // group)
    q = torch.randint(1 - top, top, shape, generator=generator, dtype=torch.int8)
    scale = torch.rand(of_groups, generator=generator) * 0.01 + 0.005
    if two_level:
        scale = (scale * 1e4).int() % 16 + 1
        scale[..., :2] = torch.tensor([15, 16])
        scale = scale * 2.0 ** -torch.arange(9, 9 + EXPERTS).reshape(-1, 1, 1)
    if dtype == FP8:
        q, scale = q.to(FP8), scale[:, :1].expand(of_groups)
    zero = torch.randint(-top, top, of_groups, generator=generator, dtype=torch.int8)
    return q, scale, zero if zeros else None, torch.randn(EXPERTS, OUTPUTS, generator=generator)


@pytest.mark.parametrize("bits", [4, 8])
@interpreted
def test_float_zero_points_are_dequantized(bits):
    q, scale, zero, _ = weights(bits, 32, True, torch.float16, False)
    zero, rows = zero + 0.3, InputFormat(torch.float16)
    found = pack(q, scale, zero, None, rows, torch.float16, bits=bits, group=32)
    assert isinstance(found, DenseWeight)
    by_group = q.unflatten(-1, (-1, 32)).double() - zero[..., None].double()
    wanted = (by_group * scale[..., None].double()).flatten(-2)
    torch.testing.assert_close(found.weight.double(), wanted, rtol=2**-10, atol=1e-7)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", CASES)
@interpreted
def test_together_as_one_by_one(case, bias):
    bits, group, zeros, dtype = CASES[case]
    q, scale, zero, added = weights(bits, group, zeros, dtype, "two_level" in case)
    rows = InputFormat(dtype, group=128 if case == "fp8_block" else None)
    parts = (q, scale, zero, added if bias else None)
    together = pack(*parts, rows, torch.float16, bits=bits, group=group)
    for i in range(EXPERTS):
        alone = [None if part is None else part[i] for part in parts]
        wanted = pack(*alone, rows, torch.float16, bits=bits, group=group)
        assert type(together) is type(wanted)
        kind = "w8a8" if case == "fp8" else case.replace("fp8_", "fp8").split("_")[0]
        assert type(wanted).__name__.lower() == f"{kind}weight"
        for field in fields(wanted):
            found, own = getattr(together, field.name), getattr(wanted, field.name)
            if isinstance(own, torch.Tensor):
                assert (found.dtype, found[i].stride()) == (own.dtype, own.stride()), field.name
                found, own = (t.contiguous().view(torch.uint8) for t in (found[i], own))
                assert torch.equal(found, own), field.name
            else:
                assert found == own, field.name


@interpreted
def test_one_without_two_levels_among_those_with_them():
    q, scale, _, _ = weights(4, 128, False, torch.int8, True)
    assert pack_w4a8(q, scale).unit is not None
    scale[1, 5, 1] *= 1.01
    assert pack_w4a8(q, scale).unit is None


@interpreted
def test_what_does_not_fit_is_refused():
    q, scale, _, bias = weights(4, 128, False, torch.float16, False)
    for wrong in (scale[:2], scale[0], scale[:, :64]):
        refused(r"needed are floats \[3, 256\] of groups", pack_w4a16, q, wrong)
    refused(r"bias is \(256,\); needed is \(3, 256\)", pack_w4a16, q, scale, bias[0])
    q[2, 5, 7] = -128
    refused("outside of", pack_w4a16, q, scale)


@interpreted
def test_floats_of_32_bits_are_multiplied_by_torch():
    q, scale, zeros, bias = weights(4, 128, True, torch.float32, True)
    x = torch.randn(3, q.shape[2])
    for bits in (4, 8):
        parts = q[0], scale[0], zeros[0], bias[0], InputFormat(x.dtype), x.dtype
        own = pack(*parts, bits=bits, group=128)
        assert isinstance(own, DenseWeight)
        y = own.run(x, None, Workspace.on("cpu"), x.dtype)
        assert torch.equal(y, torch.nn.functional.linear(x, own.weight, bias[0]))
