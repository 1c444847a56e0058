"""Scales of weights: what each search promises."""

import pytest
import torch

from formats.scheme import LayerScheme, WeightSpec
from formats.stored.weights import read_weights, scale_shape, weight_tensors
from kernels.numerics import TYPES, dequantize, quantize
from ptq.methods.common import rounding
from ptq.methods.common.moments import output_errors
from ptq.methods.common.rounding import FACTORS, choose_qparams, round_weight

GROUPS = WeightSpec(dtype="int4", granularity="group", group_size=32)
SPECS = (
    GROUPS,
    GROUPS.model_copy(update={"symmetric": False}),
    GROUPS.model_copy(update={"two_level": True}),
    WeightSpec(dtype="int4"),
    WeightSpec(),
    WeightSpec(dtype="int8", granularity="group", group_size=64),
    WeightSpec(dtype="fp8_e4m3", granularity="block"),
    WeightSpec(dtype="fp8_e4m3", granularity="per_tensor"),
)


def problem(rows=48, columns=192) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, columns, generator=generator) * torch.logspace(-1, 1, columns)
    weight = torch.randn(rows, columns, generator=generator)
    weight[:, ::17] *= 4  # worth cutting
    return weight, x.T @ x / len(x)


def error(weight, scale, zeros, spec) -> torch.Tensor:
    q = quantize(weight, scale, TYPES[spec.dtype], zeros, spec.block)
    return weight - dequantize(q, scale, zeros, spec.block)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
def test_scales_have_a_place_for_every_block(spec):
    weight, moments = problem()
    for search in ("absmax", "mse", "weighted_mse"):
        stored = round_weight(weight, spec, torch.bfloat16, search, moments)
        assert stored.scale.shape == scale_shape(spec, (48, 192))
        assert torch.equal(stored.scale.bfloat16().float(), stored.scale)
        assert (stored.zero_point is None) == spec.symmetric


@pytest.mark.parametrize("spec", SPECS[:6], ids=lambda spec: spec.text)
def test_each_search_lowers_its_own_error(spec):
    weight, moments = problem()
    measures = {
        "mse": lambda e: e.square().sum(),
        "weighted_mse": lambda e: (e.square() * moments.diagonal()).sum(),
    }
    if spec.granularity == "per_channel":  # one group: the whole output
        measures["output_mse"] = lambda e: output_errors(e, moments).sum()
    start = error(weight, *choose_qparams(weight, spec, torch.float32), spec)
    for search, measure in measures.items():
        found = error(weight, *choose_qparams(weight, spec, torch.float32, search, moments), spec)
        assert measure(found) <= measure(start) * (1 if spec.dtype == "int8" else 0.97)


def test_output_mse_is_the_error_of_each_groups_output():
    weight, moments = problem()
    groups = slice(64, 96)
    whole, _ = choose_qparams(weight, GROUPS, torch.float32, "output_mse", moments)
    alone, _ = choose_qparams(
        weight[:, groups], GROUPS, torch.float32, "output_mse", moments[groups, groups]
    )
    assert torch.equal(whole[:, 2:3], alone)


@pytest.mark.parametrize("spec", SPECS[:6], ids=lambda spec: spec.text)
@pytest.mark.parametrize("power", [-9, -13, -18, -24])
def test_small_weights_lose_no_more_in_half_precision(spec, power):
    """A row of fp16 whose scales fp16 holds as subnormals, or not at all, is as fine as another."""
    weight = (problem()[0] * 2.0**power).half().float()
    weight[3] = 0

    def lost(dtype: torch.dtype) -> float:
        stored = round_weight(weight, spec, dtype)
        tensors = weight_tensors(LayerScheme(weights=spec), stored, dtype)
        assert tensors["weight_scale"].dtype in (dtype, torch.float32)
        read = read_weights(LayerScheme(weights=spec), [(48, 192)], tensors.__getitem__)
        assert torch.equal(read.scale, stored.scale)
        values = dequantize(read.q, read.scale, read.zero_point, spec.block)
        assert not values[3].any()
        return ((values - weight).norm() / weight.norm()).item()

    assert lost(torch.float16) <= 1.01 * lost(torch.float32)


def test_a_row_of_zeros_keeps_the_scales_in_half_precision():
    weight = problem()[0].half().float()
    weight[3] = 0
    for spec in SPECS[:6]:
        scale = round_weight(weight, spec, torch.float16).scale
        assert torch.equal(scale.half().float(), scale)
        assert (scale > 0).all()


def test_two_rounds_are_one():
    """A dequantized weight rounds to itself where its largest values were not cut."""
    weight, _ = problem()
    spec = WeightSpec()
    stored = round_weight(weight, spec, torch.float32)
    again = round_weight(dequantize(stored.q, stored.scale), spec, torch.float32)
    assert torch.equal(again.q, stored.q)


def test_output_mse_of_blocks_of_rows_and_columns():
    """A block's scale is the best of those tried for the outputs of all its rows, edges included."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(130, 200, generator=generator)
    weight[:, :128] *= torch.rand(1, 128, generator=generator) ** 4
    x = torch.randn(500, 200, generator=generator)
    moments, spec = x.T @ x / 500, WeightSpec(dtype="fp8_e4m3", granularity="block")
    scale, _ = choose_qparams(weight, spec, torch.float32, "output_mse", moments)
    start, _ = choose_qparams(weight, spec, torch.float32)
    assert scale.shape == start.shape == (2, 2)
    for i, rows in enumerate((slice(0, 128), slice(128, 130))):
        for j, columns in enumerate((slice(0, 128), slice(128, 200))):
            part, h = weight[rows, columns], moments[columns, columns]

            def error(s: torch.Tensor, part=part, h=h) -> float:
                kind = TYPES["fp8_e4m3"]
                left = part - dequantize(quantize(part, s, kind), s)
                return ((left @ h) * left).sum().item()

            tried = [error(start[i, j] * factor) for factor in FACTORS]
            assert error(scale[i, j]) == pytest.approx(min(tried), rel=1e-5)
            assert scale[i, j] <= start[i, j]


@pytest.mark.parametrize(("dtype", "share"), [("int8", 0.8), ("int4", 1.0)])
def test_channels_far_past_their_best_scale_are_left_out(monkeypatch, dtype, share):
    spec = WeightSpec(dtype=dtype)
    weight, moments = problem(rows=256)
    weight[::3, 5] *= 20  # these have to cut much, others next to nothing
    rows, errors_of = list[int](), rounding._output_errors

    def counted(error, *rest):
        rows.append(len(error))
        return errors_of(error, *rest)

    monkeypatch.setattr(rounding, "_output_errors", counted)
    found, _ = choose_qparams(weight, spec, torch.float32, "output_mse", moments)
    tried = sum(rows)
    monkeypatch.setattr(rounding, "FAR", float("inf"))
    wanted, _ = choose_qparams(weight, spec, torch.float32, "output_mse", moments)
    assert torch.equal(found, wanted)
    assert len(wanted.unique()) > 200
    assert sum(rows) - tried == len(FACTORS) * 256
    assert tried < share * len(FACTORS) * 256
