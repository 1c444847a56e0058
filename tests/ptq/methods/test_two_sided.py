"""Rounding against the model's KL: never worse than GPTQ in that metric, for every scheme."""

import pytest
import torch

from calibrate.gradients import FisherFactors
from formats.scheme import PRESETS, Scheme, WeightSpec
from ptq.methods.common.rounding import round_weight
from ptq.methods.common.with_feedback import fit_scales
from ptq.methods.gptq import GPTQ, GPTQSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.two_sided import Layer, Side, TwoSided, TwoSidedSpec
from ptq.pipeline.passes import observe
from ptq.plan.describe import explain
from tests.ptq.methods.test_gptq import SPECS as OF_GPTQ
from tests.ptq.methods.test_gptq import W4
from tests.ptq.quantizing import make_plan, observed_work, with_gradients
from tests.tiny_families import DEEPSEEK

Q4_K = PRESETS["w4_q4_k"].weights
assert Q4_K is not None
SPECS = (
    *OF_GPTQ,
    Q4_K,
    WeightSpec(dtype="fp8_e4m3", granularity="per_tensor"),
    WeightSpec(dtype="fp4_e2m1", granularity="group", group_size=32),
)


def matrix(size: int, seed: int) -> torch.Tensor:
    """Second moments of correlated channels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * size, size, generator=generator)
    x = x @ torch.randn(size, size, generator=generator)
    return x.T @ x / len(x)


def problem(spec: WeightSpec, blocks: int = 1) -> tuple[Layer, FisherFactors, list[Side]]:
    """A layer of 72 outputs and its factors: G whole, or in blocks of 40."""
    columns = 256 if spec.super_blocks else 128
    weight = torch.randn(72, columns, generator=torch.Generator().manual_seed(0))
    inputs, outputs = matrix(columns, 1), matrix(72, 2)
    outputs /= outputs.trace()
    if blocks == 2:
        padded = torch.nn.functional.pad(outputs, (0, 8, 0, 8))
        found = torch.stack([padded[:40, :40], padded[40:, 40:]])
    else:
        found = outputs[None]
    side = Side.of(inputs, 0.01, act_order=True)
    others = [Side.of(g, 0.1, act_order=True) for g in found]
    assert side is not None
    nearest = round_weight(weight, spec, torch.float32, "output_mse", inputs)
    layer = Layer(weight, spec, torch.float32, nearest, side)
    return layer, FisherFactors(inputs, found), [other for other in others if other is not None]


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
def test_it_costs_less_than_gptq_and_sweeps_lower_it_further(spec, blocks):
    layer, factors, outputs = problem(spec, blocks)

    def cost(stored) -> float:
        return factors.kl(layer.weight - layer.dequantized(stored)).item()

    seen = [cost(layer.two_sided(outputs, sweeps)) for sweeps in (0, 1, 3)]
    one_sided = cost(layer.one_sided())
    assert one_sided < 0.7 * cost(layer.stored)
    assert seen[0] < 0.9 * one_sided
    assert seen[2] < seen[1] < seen[0]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
def test_with_outputs_that_do_not_hang_together_it_is_gptq(spec):
    layer, _, _ = problem(spec)
    eye = Side.of(torch.eye(72), 0.01, act_order=True)
    assert eye is not None
    ours, theirs = layer.two_sided([eye], 0), layer.one_sided()
    same = ours.q.float() == theirs.q.float()
    assert same.float().mean() > 0.98  # a tie that falls otherwise changes what comes after it
    assert torch.equal(ours.scale, theirs.scale)


def test_fitted_scales_are_those_of_least_cost():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 12, 6, generator=generator)
    group_of = torch.tensor([1, 0] * 6)
    scale = weight.abs().amax(dim=1, keepdim=True).expand(2, 2, 6) / 7.5
    q = (weight / scale[:, group_of]).round().clamp(-8, 7)
    rows, columns = torch.stack([matrix(6, 1), matrix(6, 2)]), matrix(12, 3)

    def cost(s):
        error = weight - q * s[:, group_of]
        return ((columns @ error @ rows) * error).sum()

    found = scale
    for _ in range(200):
        found = fit_scales(weight, q, found, group_of, rows, columns, lambda s, _: s)
    wanted = found.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cost(wanted), wanted)
    assert cost(found) < cost(scale)
    assert slope.abs().max() < 1e-2 * cost(scale)


def fisher_work(plan):
    """The first block of the plan's model, with its gradients."""
    work = with_gradients(observed_work(plan), plan)
    observe(work, [GPTQ(GPTQSpec())])
    return work


@pytest.mark.parametrize("scheme", ["w4", "fp8_block", "a8w4_two_level", "a8w8c8"])
def test_layers_of_a_block_cost_the_model_less(tiny_llama, tmp_path, scheme):
    spec = TwoSidedSpec(sweeps=1)
    plan = make_plan(tiny_llama, tmp_path, PRESETS[scheme], methods=(spec,))
    work = fisher_work(plan)
    costs = []
    for method in (TwoSided(spec), GPTQ(GPTQSpec())):
        method.solve(work)
        costs.append(
            {
                name: work.fisher(name).kl(work.block.linears[name].weight - layer.dequantized())
                for name, layer in method.solved.items()
            }
        )
        method.commit(work)
        assert list(work.quantized) == list(work.targets)
    assert sum(costs[0].values()) < 0.9 * sum(costs[1].values())
    assert all(costs[0][name] < 1.05 * costs[1][name] for name in work.targets)
    assert "two_sided: solved against the model's KL" in "\n".join(explain(plan))


def test_factors_that_do_not_serve_are_told_of(tiny_llama, tmp_path):
    spec = TwoSidedSpec()
    plan = make_plan(tiny_llama, tmp_path, PRESETS["w4"], methods=(spec,))
    work, method = fisher_work(plan), TwoSided(spec)
    assert work.gradients is not None
    prefix = "model.layers.0.mlp."
    work.gradients.output(prefix + "up_proj").outputs.zero_()  # as of an expert without tokens
    torch.diagonal(work.gradients.output(prefix + "gate_proj").outputs[0]).mul_(0.3)
    method.solve(work)
    events = [(event.module, event.kind) for event in work.events]
    assert events == [(prefix + "gate_proj", "damping_raised"), (prefix + "up_proj", "fallback")]
    weight = work.block.linears[prefix + "up_proj"].weight
    nearest = round_weight(weight, plan.recipe.scheme.weights, torch.bfloat16)
    assert torch.equal(method.solved[prefix + "up_proj"].weight.q, nearest.q)


def test_a_layer_that_gptq_serves_better_keeps_its_result(tiny_llama, tmp_path, monkeypatch):
    spec = TwoSidedSpec()
    plan = make_plan(tiny_llama, tmp_path, PRESETS["w4"], methods=(spec,))
    work, method = fisher_work(plan), TwoSided(spec)
    monkeypatch.setattr(Layer, "two_sided", lambda layer, outputs, sweeps: layer.stored)
    method.solve(work)
    assert {event.kind for event in work.events} == {"fallback"}
    assert all("of GPTQ" in event.message for event in work.events)


def test_layers_of_latent_attention_cost_the_model_less(make_model, tmp_path):
    kind, own = DEEPSEEK["v3"]
    spec = TwoSidedSpec()
    plan = make_plan(make_model(kind, **own), tmp_path, PRESETS["w4"], methods=(spec,))
    work, method, plain = fisher_work(plan), TwoSided(spec), RTNSpec().algorithm()
    for rounding in (method, plain):
        rounding.solve(work)
    attention = [name for name in work.targets if "self_attn" in name]
    assert len(attention) == 5
    for name in attention:
        weight, cost = work.block.linears[name].weight, work.fisher(name).kl
        ours, nearest = (cost(weight - x.solved[name].dequantized()) for x in (method, plain))
        assert ours < 0.9 * nearest


def test_it_goes_through_for_experts_and_asymmetric_weights(make_model, tmp_path):
    weights = W4.model_copy(update={"symmetric": False})
    spec = TwoSidedSpec(act_order=False)
    plan = make_plan(make_model("mixtral"), tmp_path, Scheme(weights=weights), methods=(spec,))
    work, method = fisher_work(plan), TwoSided(spec)
    method.solve(work)
    assert set(method.solved) == set(work.targets)
    assert all(torch.isfinite(layer.dequantized()).all() for layer in method.solved.values())
