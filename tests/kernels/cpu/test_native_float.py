"""Compiled products of fp32 activations: every format on every instruction set.

A weight that is decoded wrongly cannot hide in a sum: rows of the identity give it back bit by bit.
Sums are held to what rounding allows at most, and rows to have the same bits in any call.
"""

from ctypes import byref
from typing import NamedTuple

import pytest
import torch

from kernels.cpu import native
from kernels.cpu.structures import FLOATS, NO_ZERO, SCALE_F16, LinearArgs
from kernels.cpu.weights import pack_quantized_weight

pytestmark = pytest.mark.skipif(not native.supported(), reason="no C++ compiler")
SIZES = [(1, 1), (3, 7), (33, 61), (61, 33), (96, 288), (130, 577), (33, 1025), (16, 4544)]  # N, K
SEGMENT = 256  # at most as many inputs are summed before they are added to the total
WIDE = 256  # inputs of longer groups stay floats


class Kind(NamedTuple):
    """A format with its granularity."""

    fmt: str
    group: int | None = None
    asymmetric: bool = False
    float_zeros: bool = False


KINDS = [
    *[Kind("f32"), Kind("bf16"), Kind("f16"), Kind("fp8_e4m3", 33), Kind("fp8_e4m3"), Kind("int8")],
    *[Kind("fp8_e4m3", 128), Kind("int8", 128), Kind("int8", 32, True), Kind("int8", None, True)],
    *[Kind("int8", 33, True), Kind("int4"), Kind("int4", 64), Kind("int4", 32, True)],
    *[Kind("int4", 128, True), Kind("int4", None, True), Kind("int4", 33, True)],
    *[Kind("int8", 32, True, True), Kind("int4", 32, True, True), Kind("int4", 33, True, True)],
]


class Weight(NamedTuple):
    """What is packed, and the values it stands for."""

    packed: torch.Tensor
    values: torch.Tensor  # fp64 [N, K]
    bias: torch.Tensor | None  # fp64 [N]


def codes_of(fmt: str, outputs: int, inputs: int) -> torch.Tensor:
    """Every code of a format in turn (e4m3: but NaN), each row beginning elsewhere."""
    if fmt in ("f32", "bf16"):
        return torch.randn(outputs, inputs).to(torch.float32 if fmt == "f32" else torch.bfloat16)
    turn = torch.arange(outputs)[:, None] * 11 + torch.arange(inputs)
    if fmt == "f16":  # every subnormal number is among them
        bits = turn * (7 if outputs * inputs > 9000 else 149) % 63488
        return torch.where(bits < 31744, bits, bits + 1024).to(torch.uint16).view(torch.float16)
    if fmt == "fp8_e4m3":
        finite = [c for c in range(256) if c & 0x7F != 0x7F]
        return torch.tensor(finite, dtype=torch.uint8)[turn % 254].view(torch.float8_e4m3fn)
    return ((turn % 256) - 128 if fmt == "int8" else (turn % 16) - 8).to(torch.int8)


def weight(kind: Kind, outputs: int, inputs: int, with_bias: bool = True) -> Weight:
    fmt, group, asymmetric, float_zeros = kind
    q = codes_of(fmt, outputs, inputs)
    group = inputs if group is None else min(group, inputs)
    groups = -(-inputs // group)
    scale = zero = None
    values, of = q.double(), torch.arange(inputs) // group
    if asymmetric:
        zero = torch.randint(-128, 128, (outputs, groups), dtype=torch.int8)
        if float_zeros:  # differences and their products with 24 bits, rounded once in all
            zero = zero / 16 - 300
        values = values - zero[:, of]
    if fmt not in FLOATS.values():
        scale = torch.rand(outputs, groups) + 0.5
        if fmt == "int4" and groups > 1:
            scale = scale.bfloat16().float()  # is packed as bf16
        values = values * scale[:, of]
    bias = torch.randn(outputs) if with_bias else None
    packed = native.pack(q, fmt, scale, zero, bias, group)
    return Weight(packed, values, None if bias is None else bias.double())


def most_error(x: torch.Tensor, w: Weight, kind: Kind) -> torch.Tensor:
    """Bound of |error|: each sum of n rounds n times (2 n without fused operations).

    Inputs of short groups of integers may become int16: multiples of a power of two that is no more
    than their absmax / 16128.
    """
    inputs = x.shape[1]
    group = inputs if kind.group is None else min(kind.group, inputs)
    segments = -(-inputs // group) * -(-group // (SEGMENT // 2))
    roundings = 2 * (min(SEGMENT, group) + segments + 3)
    bias = 0 if w.bias is None else w.bias.abs()
    rounded = roundings * 2.0**-24 * (x.double().abs() @ w.values.abs().T + bias)
    if not kind.fmt.startswith("int") or group > WIDE:
        return rounded
    steps = [part.amax(1, keepdim=True).expand_as(part) / 16128 for part in x.abs().split(group, 1)]
    return rounded + torch.cat(steps, 1).double() / 2 @ w.values.abs().T


def check_sums(x: torch.Tensor, w: Weight, kind: Kind) -> None:
    """Sums of rows are as exact as rounding allows."""
    want = torch.nn.functional.linear(x.double(), w.values, w.bias)
    assert ((native.linear(x, w.packed) - want).abs() <= most_error(x, w, kind)).all(), x.shape


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_as_exact_as_rounding_allows(isa, kind):
    for outputs, inputs in SIZES:
        w = weight(kind, outputs, inputs)
        for rows in (1, 2, 3, 4, 5, 13, 66):
            check_sums(torch.randn(rows, inputs), w, kind)


INTEGERS = [kind for kind in KINDS if kind.fmt.startswith("int")]


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("rows", [1, 2, 5, 26])
def test_inputs_far_larger_than_others_spoil_their_own_group_alone(isa, kind, rows):
    w, x = weight(kind, 70, 577), torch.randn(rows, 577)
    x[:, 40], x[:, 300] = 3e4, -1e-6
    check_sums(x, w, kind)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_the_largest_sums_of_a_group_do_not_overflow(isa, fmt, rows):
    low, high = (-128, 127) if fmt == "int8" else (-8, 7)
    q = torch.tensor([low, high], dtype=torch.int8)[:, None].repeat(20, WIDE)
    x = torch.full((rows, WIDE), 1.984) * torch.tensor([1, -1])[torch.arange(rows) % 2, None]
    want = (x[:, :1] * torch.tensor([low, high]) * WIDE).repeat(1, 20)
    got = native.linear(x, native.pack(q, fmt, torch.ones(40, 1)))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [2, 15])
def test_what_is_not_finite_does_not_stay_unseen(isa, fmt, bad, rows):
    packed, x = weight(Kind(fmt, 32), 40, 100).packed, torch.randn(rows, 100)
    x[1, 70] = bad
    finite = native.linear(x, packed).isfinite()
    assert not finite[1].any()
    assert finite[0].all()


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_scales_that_fp16_holds_are_packed_in_two_bytes(isa, fmt):
    q = codes_of(fmt, 70, 96)
    scale = (torch.arange(70 * 3) * 13 + 1).to(torch.int16).view(torch.float16).float().view(70, 3)
    packed = native.pack(q, fmt, scale, group=32)  # half of them are subnormal numbers
    assert native.header(packed).scale_type == SCALE_F16
    want = q.float() * scale.repeat_interleave(32, 1)
    assert torch.equal(native.rows(packed, torch.arange(70)), want)
    assert torch.equal(native.linear(torch.eye(96), packed), want.T)


def test_zero_points_of_negative_scales_are_not_packed(isa):
    q, scale = codes_of("int4", 70, 90), torch.rand(70, 3) + 0.5
    zero = torch.randint(-1, 1, (70, 3), dtype=torch.int8)
    packed = native.pack(q, "int4", scale, zero, group=32)
    assert native.header(packed).zero_type == NO_ZERO
    of = torch.arange(90) // 32
    want = (q - zero[:, of]).float() * scale[:, of]
    assert torch.equal(native.linear(torch.eye(90), packed), want.T)


@pytest.mark.parametrize("rows", [1, 7])
def test_long_sums_of_one_sign_do_not_drift(isa, rows):
    inputs = 100_000
    ones = torch.ones(2, inputs)
    w = Weight(native.pack(ones, "f32"), ones.double(), None)
    check_sums(torch.full((rows, inputs), 0.1), w, Kind("f32"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1.0, 2.0**-60, -(2.0**50)])
def test_rows_of_the_identity_give_the_weight_back(isa, kind, factor):
    w = weight(kind, 21, 300, with_bias=False)
    want = (w.values.float() * factor).T
    eye = torch.eye(300) * factor
    assert torch.equal(native.linear(eye, w.packed), want)
    for rows in (1, 2, 3, 4):
        few = [native.linear(part, w.packed) for part in eye.split(rows)]
        assert torch.equal(torch.cat(few), want), rows


@pytest.mark.parametrize("kind", KINDS[1::2])
def test_a_row_has_the_same_bits_in_any_call(isa, kind, with_threads):  # all formats but fp32
    w, x = weight(kind, 20, 270), torch.randn(130, 270)
    with_threads(1)
    whole = native.linear(x, w.packed)
    for rows in range(1, 131):
        with_threads(1 if rows % 8 else 1 + rows // 8 % 8)
        assert torch.equal(native.linear(x[:rows], w.packed), whole[:rows]), rows
        if rows % 5 == 0:
            assert torch.equal(native.linear(x[-rows:], w.packed), whole[-rows:]), rows


@pytest.mark.parametrize("kind", [Kind("f32"), Kind("fp8_e4m3", 128), Kind("int4", 32, True)])
@pytest.mark.parametrize("threads", range(1, 9))
def test_threads_do_not_change_a_bit(isa, kind, threads, with_threads):
    w, x = weight(kind, 200, 290), torch.randn(70, 290)
    with_threads(1)
    whole = native.linear(x, w.packed)
    with_threads(threads)
    for rows in (1, 2, 3, 4, 5, 31, 70):
        assert torch.equal(native.linear(x[:rows], w.packed), whole[:rows]), rows


def test_rows_of_several_blocks_stay_as_they_are(isa):
    w, x = weight(Kind("int8", 32), 33, 50), torch.randn(2100, 50)  # 1024 rows a block at most
    parts = [native.linear(part, w.packed) for part in x.split(100)]
    assert torch.equal(native.linear(x, w.packed), torch.cat(parts))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.asymmetric])
def test_rows_are_gathered_with_their_zero_points(isa, kind):
    w, ids = weight(kind, 70, 300), torch.tensor([69, 0, 16, 0])
    assert torch.equal(native.rows(w.packed, ids), w.values.float()[ids])


def test_float_zero_points_are_for_float_inputs():
    q, scale = torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 1)
    with pytest.raises(ValueError, match="zero points are floats"):
        pack_quantized_weight(q, scale, "int4", scale, 32, integer_inputs=True)


def test_bf16_gives_the_bits_of_the_same_weight_in_fp32(isa):
    q = torch.randn(70, 301).bfloat16()
    for rows in (1, 2, 3, 4, 9):
        x = torch.randn(rows, 301)
        halves, whole = native.pack(q, "bf16"), native.pack(q.float(), "f32")
        assert torch.equal(native.linear(x, halves), native.linear(x, whole))


@pytest.mark.parametrize("kind", [Kind("bf16"), Kind("fp8_e4m3"), Kind("int4", 32, True)])
@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize("rows", [1, 3, 4, 40])
@pytest.mark.parametrize("outputs", [5, 16, 41])
def test_strides_and_adding_to_what_is_there(isa, kind, accumulate, rows, outputs):
    w, inputs = weight(kind, outputs, 70), 70
    x, y = torch.randn(rows, inputs + 9), torch.randn(rows, outputs + 5)
    want = y.clone()
    product = native.linear(x[:, :inputs], w.packed)
    want[:, :outputs] = y[:, :outputs] + product if accumulate else product
    args = LinearArgs(
        *(w.packed.data_ptr(), x.data_ptr(), None, 0, 0, accumulate),
        *(rows, x.shape[1], y.shape[1], y.data_ptr()),
    )
    assert native.loaded().ptq_linear(byref(args), 2) == 0
    assert torch.equal(y, want)
