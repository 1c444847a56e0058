"""AWQ's factors, and refinement by gradient."""

import pytest
import torch

from formats.scheme import PRESETS, Scheme, WeightSpec
from ptq.methods.awq import AWQ, AWQSpec, activation_scale
from ptq.methods.common.block import quantized_block
from ptq.methods.common.rounding import round_to_nearest
from ptq.methods.gptq import GPTQSpec
from ptq.methods.refine import Adjustable, Cost, Refine, RefineSpec
from ptq.methods.rtn import RoundToNearest, RTNSpec
from ptq.pipeline.passes import observe
from tests.ptq.quantizing import make_plan, observed_work, quantized, solved, with_gradients

W4 = PRESETS["w4"]


def test_factors_are_equations_4_and_5():
    mean = torch.tensor([4.0, 1.0, 0.25])
    assert activation_scale(mean, 1.0).tolist() == pytest.approx([4.0, 1.0, 0.25])
    assert activation_scale(mean * 3, 0.5).tolist() == pytest.approx([2.0, 1.0, 0.5])
    assert activation_scale(mean, 0.0).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("preset", ["w4", "a8w4", "fp8_channel"])
def test_awq_keeps_the_function_and_lowers_the_error(tiny_llama, tmp_path, preset):
    spec = AWQSpec(steps=5, search_samples=3)
    plan = make_plan(tiny_llama, tmp_path, PRESETS[preset], methods=(spec, RTNSpec()))
    work = observed_work(plan)
    before = [work.block.run(sample) for sample in range(3)]
    method = solved(work, AWQ(spec))
    assert len(work.smoothing) == 4
    for row in work.smoothing:
        assert [c.alpha for c in row.candidates] == [None, 0.2, 0.4, 0.6, 0.8, 1.0]
        assert row.error == min(c.error for c in row.candidates)
    if preset == "w4":
        assert any(row.alpha is not None for row in work.smoothing)
    method.commit(work)
    for sample, expected in enumerate(before):
        assert (work.block.run(sample) - expected).norm() / expected.norm() < 3e-6


def refined(plan, tokens=None):
    """Block 0 rounded, with what a refinement sees."""
    work = observed_work(plan)
    work.block.quantized_inputs = [x.clone() for x in work.block.inputs]
    work.quantized.update(round_to_nearest(work))
    return work


def test_refinement_may_lower_what_the_error_costs_the_model(tiny_llama, tmp_path):
    spec = RefineSpec(iterations=12, batch=3, learning_rate=0.02, metric="kl")
    plan = make_plan(tiny_llama, tmp_path, W4, methods=(RTNSpec(), spec))
    work, method = with_gradients(refined(plan), plan), Refine(spec)
    assert method.gradients
    assert not Refine(RefineSpec()).gradients
    cost = Cost.of(work)
    targets = [work.block.run(sample) for sample in range(len(work.block.inputs))]

    def error(count=cost) -> float:
        with quantized_block(work):
            outputs = [work.block.run(sample) for sample in range(len(targets))]
        pairs = enumerate(zip(outputs, targets, strict=True))
        return sum(count(x, y, i).square().sum().item() for i, (x, y) in pairs)

    before = error()
    method.solve(work)
    method.commit(work)
    assert error() < 0.97 * before
    assert not work.events
    seen = work.gradients.of[work.block.name, "states"]
    seen.outputs.zero_()
    seen.mean.zero_()
    assert error(Cost.of(work)) == block_error(work)  # nothing tells one error from another


def block_error(work) -> float:
    targets = [work.block.run(sample) for sample in range(len(work.block.inputs))]
    with quantized_block(work):
        outputs = [work.block.run(sample) for sample in range(len(work.block.inputs))]
    return sum((a - b).square().sum().item() for a, b in zip(outputs, targets, strict=True))


SYMMETRIC = WeightSpec(dtype="int4", granularity="group", group_size=32)


@pytest.mark.parametrize(
    "scheme",
    [W4, PRESETS["a8w4"], PRESETS["a8w8"], Scheme(weights=SYMMETRIC.model_copy(update={"symmetric": False}))],
    ids=lambda scheme: f"{scheme.wac}-{scheme.weights.symmetric}",
)  # fmt: skip
def test_refinement_lowers_the_error_of_the_block(tiny_llama, tmp_path, scheme):
    spec = RefineSpec(iterations=12, batch=3, learning_rate=0.02)
    work = refined(make_plan(tiny_llama, tmp_path, scheme, methods=(RTNSpec(), spec)))
    before = block_error(work)
    method = solved(work, Refine(spec), see=False)
    old = dict(work.quantized)
    method.commit(work)
    after = block_error(work)
    assert after < before
    assert any(not torch.equal(work.quantized[n].weight.q, old[n].weight.q) for n in old)
    dtype = torch.float32 if scheme.wac == "a8w8" else torch.bfloat16
    for name, layer in work.quantized.items():
        assert layer.weight.q.dtype == torch.int8
        assert torch.equal(layer.weight.scale.to(dtype).float(), layer.weight.scale)
        assert layer.input_scale is old[name].input_scale
        assert layer.statistic == "absmax, refined"


def test_what_does_not_get_better_stays(tiny_llama, tmp_path):
    spec = RefineSpec(iterations=1, batch=1, learning_rate=1.0)
    work = refined(make_plan(tiny_llama, tmp_path, W4, methods=(RTNSpec(), spec)))
    old = dict(work.quantized)
    method = solved(work, Refine(spec), see=False)
    method.commit(work)
    assert work.quantized == old
    assert [event.kind for event in work.events] == ["fallback"]


def test_nothing_moved_is_the_layer_itself(tiny_llama, tmp_path):
    work = refined(make_plan(tiny_llama, tmp_path, W4, methods=(RTNSpec(),)))
    for name, layer in work.quantized.items():
        weight = work.block.linears[name].weight
        still = Adjustable.of(layer, weight, torch.bfloat16)
        assert torch.equal(still.solved().weight.q, layer.weight.q)
        assert torch.equal(still.weight(), layer.dequantized())
        still.weight().square().sum().backward()
        assert still.offset.grad is not None
        assert still.offset.grad.abs().sum() > 0
        assert still.factor.grad is not None


def test_refined_runs_are_equal_and_better(tiny_llama, tmp_path):
    """Twice the same bytes; and the blocks after the first make up for those before."""
    spec = RefineSpec(iterations=20, batch=3)
    found = []
    for name in ("a", "b"):
        result = quantized(tiny_llama, tmp_path / name, W4, methods=(GPTQSpec(), spec))
        found.append((result.checkpoint / "model.safetensors").read_bytes())
        assert "output_mse, refined" in {row.statistic for row in result.scale_table.entries}
    assert found[0] == found[1]


def test_rounding_and_its_observers_share_one_pass(tiny_llama, tmp_path):
    spec = RTNSpec(scale="weighted_mse")
    work = observed_work(make_plan(tiny_llama, tmp_path, W4, methods=(spec,)))
    observe(work, [RoundToNearest(spec)])
    x = torch.cat(list(work.block.inputs))
    norm = work.module("model.layers.0.input_layernorm")
    expected = norm(x).square().mean(dim=0)
    found = work.second_moments("model.layers.0.self_attn.v_proj")
    assert torch.allclose(found, expected, rtol=1e-4)
