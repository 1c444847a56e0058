"""Kernels of calibration and of solving in Triton's interpreter, against plain torch."""

import itertools

import pytest
import torch

import kernels.feedback as feedback
import kernels.triton.calibration.feedback as gpu
from calibrate.tensor_statistics import Accumulator
from formats.scheme import WeightSpec
from kernels.feedback import Grid, Rounding
from kernels.numerics import INT4, TYPES
from kernels.triton.calibration import magnitudes
from kernels.triton.calibration.feedback import descent_block, gptq_block
from kernels.triton.calibration.group_errors import group_errors, takes
from kernels.triton.calibration.magnitudes import Magnitudes
from ptq.methods.common.rounding import _output_errors, _rounding_error, choose_qparams
from ptq.methods.common.with_feedback import descent_columns
from ptq.methods.gptq import gptq_columns
from tests.kernels.cpu.test_native_feedback import upper
from tests.kernels.triton_lab import building_for, compiled, interpreted


@interpreted
def test_blocks_of_columns_are_solved_as_on_the_cpu():
    for (name, kind), zeros in itertools.product(TYPES.items(), (False, True)):
        if zeros and kind.storage.is_floating_point:
            continue
        count, size = 9, 40
        columns, scales = torch.randn(count, size), torch.rand(count, size) * 3 / kind.top
        offset = torch.randint(-3, 3, (count, size)).float() if zeros else None
        square = torch.randn(count, count) / 16
        matrix = square + square.T + torch.eye(count)
        padded = torch.cat((square, matrix), dim=1)[:, count:].T  # by columns
        ours, theirs = columns.clone(), columns.clone()
        errors = gptq_block(ours, scales, offset, padded, kind)
        expected = gptq_columns(theirs, scales, offset, matrix, kind)
        assert torch.equal(ours, theirs), name
        assert torch.allclose(errors, expected, atol=1e-5), name
        values, gradient = torch.randn(count, size), torch.randn(count, size)
        moves = descent_block(ours, values, scales, offset, gradient.clone(), padded, kind)
        expected = descent_columns(theirs, values, scales, offset, gradient, matrix, kind)
        assert torch.equal(ours, theirs), name
        assert torch.allclose(moves, expected, atol=1e-5), name


@interpreted
def test_errors_of_groups_are_those_of_plain_torch():
    weight, x = torch.randn(40, 64), torch.randn(99, 64)
    moments = x.T @ x
    w4 = WeightSpec(dtype="int4", granularity="group", group_size=32)
    for spec in (w4, w4.model_copy(update={"symmetric": False})):
        scale, zeros = choose_qparams(weight, spec, torch.float32)
        found = group_errors(weight, scale, zeros, moments, TYPES["int4"], 1)
        error = _rounding_error(weight, scale, zeros, spec)
        assert torch.allclose(found, _output_errors(error, spec.block, moments), rtol=1e-3)
    assert not takes(TYPES["int4"], 128, 192)
    assert not takes(TYPES["int4"], 256, 256)
    by_rows = group_errors(weight, scale[::8] * 1.5, None, moments, TYPES["fp8_e4m3"], 8)
    whole = (scale[::8] * 1.5).repeat_interleave(8, dim=0)
    assert torch.equal(by_rows, group_errors(weight, whole, None, moments, TYPES["fp8_e4m3"], 1))


@interpreted
def test_magnitudes_are_those_that_the_cpu_sees():
    magnitudes.MOST = 9000  # counts are put by on the way
    heads = torch.randn(3, 2, 300, 20).bfloat16().transpose(1, 2)  # [samples, T, H, D], as K lies
    inputs = torch.randn(3, 70, 1, 200)
    inputs[1, :9] = 0
    for samples in (heads, inputs):
        shape = tuple(samples.shape[2:])
        found = magnitudes.Magnitudes(*shape, samples.device, histogram=True)
        plain = Accumulator(shape)
        for x in samples:
            found.add(x)
            plain.observe(x, "x")
        seen = plain.statistics("x")
        assert torch.equal(found.channel_absmax(), seen.channel_absmax.reshape(shape))
        assert torch.equal(found.counts(), seen._dense())
    unseen = magnitudes.Magnitudes(1, 200, inputs.device, histogram=False)
    inputs[2, 3, 0, 4] = float("nan")
    unseen.add(inputs[2])
    assert unseen.counts() is None
    assert unseen.channel_absmax().isnan().sum() == 1


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.every_triton)])
@compiled
def test_they_compile_without_spills(capability):
    block, square = torch.zeros(128, 256), torch.zeros(128, 128)
    weight, scale = torch.zeros(256, 512), torch.ones(256, 4)
    seen = Magnitudes(1, 512, torch.device("cpu"), histogram=True)
    with building_for(capability) as built:
        gptq_block(block, block, None, square, INT4)
        descent_block(block, block, block, None, block, square, INT4)
        group_errors(weight, scale, None, torch.zeros(512, 512), INT4, 1)
        seen.add(weight[:, None])
    stacks = [binary.stack for binary in built]
    assert stacks[:3] == [0, 0, 0]
    assert stacks[3] <= 8  # two words of the histogram's, under Triton 3.9 alone
    assert built[2].count(r"(mma\.sync|wgmma)\S*tf32") > 0


def problem(rows: int, columns: int, kind: str, *, zeros: bool):
    """Two blocks of a weight, what they are rounded to, and factors of rows and of columns."""
    torch.manual_seed(rows * columns)
    weight = torch.randn(2, columns, rows)
    scale = (weight.abs().amax(dim=1, keepdim=True) / TYPES[kind].top).expand_as(weight)
    points = torch.full_like(weight, 3.0) if zeros else None
    to = Rounding(Grid.of(TYPES[kind]), scale.contiguous(), points)
    mix, other = torch.randn(2, rows, 2 * rows), torch.randn(columns, 2 * columns)
    return weight, to, mix @ mix.mT / rows, other @ other.T / columns


@pytest.mark.parametrize(("kind", "zeros"), [("int4", True), ("fp8_e4m3", False)])
@interpreted
def test_tiles_of_an_anti_diagonal_find_what_plain_code_finds(kind, zeros):
    gpu.SIZE = feedback.SIZE = 16  # tiles of which the interpreter takes fewer steps
    weight, to, rows, columns = problem(17, 19, kind, zeros=zeros)
    over, across = upper(rows.double()), upper(columns.double())
    wanted = feedback.round_all(weight.clone(), to, over, across)
    found = gpu.round_all(weight.clone(), to, over, across)
    assert (found == wanted).float().mean() > 0.99  # sums of another order
    values = to.values(wanted)
    gradient, ours = columns @ (weight - values) @ rows, values.clone()
    moved = feedback.move_all(gradient.clone(), values, to, rows, columns)
    assert (moved != wanted).any()
    assert (gpu.move_all(gradient, ours, to, rows, columns) == moved).float().mean() > 0.99
    assert (ours == values).float().mean() > 0.99


@compiled
def test_feedback_compiles_without_spilling():
    weight, to, rows, columns = problem(32, 32, "fp8_e4m3", zeros=False)
    with building_for(90) as built:
        gpu.round_all(weight.clone(), to, rows, columns)
        gpu.move_all(weight.clone(), weight.clone(), to, rows, columns)
    assert built
    assert not any(binary.spills() for binary in built)
