"""Compiled integer products: exact integers on every instruction set, rows that stay as they are.

Scales are powers of two wherever results are compared bit for bit with groups: then fp32 sums of
groups are exact, and any order of adding them gives the same.
"""

import ctypes

import pytest
import torch

import kernels.reference as reference
from kernels.cpu import native
from kernels.cpu.structures import LinearArgs

pytestmark = pytest.mark.skipif(not native.supported(), reason="no C++ compiler")
SIZES = [(1, 1), (3, 7), (33, 61), (61, 33), (96, 288), (288, 1025), (16, 4544)]  # N, K
MANY = (385, 386)  # blocks of 48 rows, and one or two rows left
LIMITS = {"int8": (-128, 127), "int4": (-8, 7)}


def integers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8)


def groups_of(inputs: int, group: int | None) -> int:
    return 1 if group is None else -(-inputs // group)


def want_sums(x, q, zero, scale, group) -> torch.Tensor:
    """sum over groups of scale * sum_k (q - zero) x, in fp64: exact for scales of powers of two."""
    group = q.shape[1] if group is None else group
    total = torch.zeros(x.shape[0], q.shape[0], dtype=torch.float64)
    for g, k in enumerate(range(0, q.shape[1], group)):
        part = q[:, k : k + group].double()
        if zero is not None:
            part = part - zero[:, g : g + 1].double()
        total += (x[:, k : k + group].double() @ part.T) * scale[:, g].double()
    return total


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("per_row", [False, True])
def test_int8_with_one_scale_equals_its_twin_bit_for_bit(isa, outputs, inputs, per_row):
    torch.manual_seed(outputs)
    scale, bias = torch.rand(outputs) + 0.01, torch.randn(outputs)
    q = integers(-127, 127, outputs, inputs, seed=1)
    for b in (None, bias):
        packed = native.pack(q, "int8", scale[:, None], bias=b)
        for rows in (1, 2, 3, 4, 5, 8, 13, 50, *(MANY if outputs == 33 else ())):
            x = integers(-127, 127, rows, inputs, seed=rows)
            x_scale = torch.rand(rows, 1) + 0.01 if per_row else torch.tensor([0.03])
            want = reference.int8_linear(x, x_scale, q, scale, b)
            assert torch.equal(native.linear(x, packed, x_scale), want), rows


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("group", [32, 33, 128, 1500, None])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_sums_of_groups_are_exact(isa, fmt, group, asymmetric):
    for outputs, inputs in SIZES:
        groups = groups_of(inputs, group)
        q = integers(*LIMITS[fmt], outputs, inputs, seed=1)
        zero = integers(*LIMITS[fmt], outputs, groups, seed=2) if asymmetric else None
        scale = torch.exp2(torch.randint(-2, 3, (outputs, groups)).float())
        packed = native.pack(q, fmt, scale, zero, group=group)
        for rows in (1, 3, 6, 14, *(MANY if outputs == 33 else ())):
            x = integers(-9, 9, rows, inputs, seed=rows)  # so that sums stay below 2^24
            got = native.linear(x, packed, torch.tensor([0.5]))
            want = want_sums(x, q, zero, scale, group).float() * 0.5
            assert torch.equal(got, want), (outputs, inputs, rows)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("group", [128, None])
@pytest.mark.parametrize("sign", [-127, 127])
def test_the_largest_integers_do_not_overflow(isa, fmt, group, sign):
    inputs, (low, high) = 11008, LIMITS[fmt]
    q = torch.tensor([low, high, low, high], dtype=torch.int8)[:, None].repeat(1, inputs)
    groups = groups_of(inputs, group)
    zero = torch.tensor([high, low, 0, 0], dtype=torch.int8)[:, None].repeat(1, groups)
    scale = torch.ones(4, groups)
    for z in (None, zero):
        packed = native.pack(q, fmt, scale, z, group=group)
        for rows in (1, 2, 3, 4, 7, 13, 18):
            x = torch.full((rows, inputs), sign, dtype=torch.int8)
            want = want_sums(x, q, z, scale, group)
            got = native.linear(x, packed, torch.ones(1))
            tolerance = 0 if group is None else 2.0**-21
            torch.testing.assert_close(got, want.float(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("group", [32, 64, None])
def test_any_scales_biases_and_zero_points_agree_with_fp64(isa, fmt, group):
    outputs, inputs, rows = 77, 576, 9
    groups = groups_of(inputs, group)
    q = integers(*LIMITS[fmt], outputs, inputs)
    zero = integers(*LIMITS[fmt], outputs, groups, seed=1)
    scale, x_scale = torch.rand(outputs, groups) + 0.1, torch.rand(rows, 1) + 0.1
    x, bias = integers(-127, 127, rows, inputs, seed=2), torch.randn(outputs)
    got = native.linear(x, native.pack(q, fmt, scale, zero, bias, group), x_scale)
    want = want_sums(x, q, zero, scale, group) * x_scale.double() + bias.double()
    assert (got - want).abs().max() < 4e-7 * want.abs().max()


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(77, 288, 32), (70, 1100, None)])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_a_row_has_the_same_bits_in_any_batch(
    isa, fmt, outputs, inputs, group, threads, with_threads
):
    with_threads(threads)
    scale, bias = torch.rand(outputs, groups_of(inputs, group)), torch.randn(outputs)
    q, x = integers(-7, 7, outputs, inputs), integers(-127, 127, 140, inputs, seed=1)
    x_scale = torch.rand(140, 1)
    packed = native.pack(q, fmt, scale, bias=bias, group=group)
    with_threads(1)
    single = torch.cat([native.linear(x[i : i + 1], packed, x_scale[i]) for i in range(140)])
    with_threads(threads)
    for count in (*range(1, 14), 48, 49, 97, 130):
        part = native.linear(x[3 : 3 + count], packed, x_scale[3 : 3 + count])
        assert torch.equal(part, single[3 : 3 + count]), count


@pytest.mark.parametrize("rows", [1, 5, 60])
def test_strides_are_kept_to_and_accumulate_adds(isa, rows):
    outputs, inputs, x_stride, y_stride = 33, 61, 70, 40
    q, x = integers(-127, 127, outputs, inputs), integers(-127, 127, rows, x_stride, seed=1)
    bias, x_scale = torch.arange(outputs).float(), torch.tensor([0.25])
    y = torch.arange(rows * y_stride).float().reshape(rows, y_stride)
    want = y.clone()
    want[:, :outputs] += want_sums(x[:, :inputs], q, None, torch.ones(outputs, 1), None) * 0.25
    want[:, :outputs] += bias
    packed = native.pack(q, "int8", torch.ones(outputs, 1), bias=bias)
    args = LinearArgs(
        *(packed.data_ptr(), x.data_ptr(), x_scale.data_ptr()),
        *(1, 0, 1, rows, x_stride, y_stride, y.data_ptr()),
    )
    assert native.loaded().ptq_linear(ctypes.byref(args), 1) == 0
    assert torch.equal(y, want)
