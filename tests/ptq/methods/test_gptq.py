"""GPTQ: the algorithm against its definition, and what it does where it cannot work."""

import itertools

import pytest
import torch

import ptq.methods.gptq as gptq_module
from formats.scheme import PRESETS, ActivationSpec, Scheme, WeightSpec
from kernels.numerics import TYPES, dequantize, quantize
from ptq.methods.common.moments import output_errors
from ptq.methods.common.rounding import choose_qparams
from ptq.methods.common.with_feedback import damped, descend
from ptq.methods.gptq import GPTQ, GPTQSpec, gptq, inverse_factor
from ptq.pipeline.passes import observe
from ptq.plan.describe import explain
from tests.ptq.quantizing import edit_model, make_plan, observed_work, solved
from tests.refusals import refused

W4 = WeightSpec(dtype="int4", granularity="group", group_size=32)
SPECS = (
    W4,
    W4.model_copy(update={"symmetric": False}),
    W4.model_copy(update={"two_level": True}),
    WeightSpec(dtype="int4"),
    WeightSpec(),
    WeightSpec(dtype="fp8_e4m3"),
    WeightSpec(dtype="fp8_e4m3", granularity="block"),
)


def problem(rows=24, columns=128, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and the second moments of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator)
    x = torch.randn(512, columns, generator=generator) @ mix
    return torch.randn(rows, columns, generator=generator), x.T @ x / len(x)


def textbook(weight, scale, zeros, spec, hessian, order) -> torch.Tensor:
    """Equations 2 and 3 in fp64, one column at a time, the inverse Hessian updated in full."""
    w = weight.double().clone()
    inverse = torch.linalg.inv(hessian.double())
    q = torch.zeros_like(weight)
    left = list(order)
    while left:
        j = left[0]
        rounded = quantize(w.float(), scale, TYPES[spec.dtype], zeros, spec.block)
        q[:, j] = rounded[:, j].float()
        error = (w - dequantize(rounded, scale, zeros, spec.block).double())[:, j] / inverse[j, j]
        w -= error[:, None] * inverse[j][None]
        inverse = inverse - inverse[:, j : j + 1] @ inverse[j : j + 1] / inverse[j, j]
        left = left[1:]
    return q


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
@pytest.mark.parametrize("act_order", [False, True])
def test_it_solves_as_the_paper_says(spec, act_order):
    weight, hessian = problem()
    scale, zeros = choose_qparams(weight, spec, torch.float32)
    order = torch.arange(128)
    if act_order:
        order = hessian.diagonal().argsort(descending=True)
    found = inverse_factor(hessian[order][:, order], 0.01)
    assert found is not None
    q = gptq(weight, scale, zeros, spec, found[0], order, 128)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(128)
    expected = textbook(weight, scale, zeros, spec, damped, order.tolist())
    same = (q.float() == expected).float().mean().item()
    assert same > 0.98  # a tie that falls otherwise changes the columns after it
    plain = quantize(weight, scale, TYPES[spec.dtype], zeros, spec.block)
    errors = [
        output_errors(weight - dequantize(x, scale, zeros, spec.block), hessian).sum().item()
        for x in (q, plain)
    ]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
def test_descent_ends_where_no_single_column_can_be_better(spec):
    weight, hessian = problem()
    hessian = damped(hessian, 0.01)
    scale, zeros = choose_qparams(weight, spec, torch.float32)

    def errors(q):
        return output_errors(weight - dequantize(q, scale, zeros, spec.block), hessian)

    q = quantize(weight, scale, TYPES[spec.dtype], zeros, spec.block)
    order = hessian.diagonal().argsort(descending=True)
    seen = [errors(q)]
    for _ in range(60):
        q = descend(q, weight, scale, zeros, spec, hessian, order, 48)
        seen.append(errors(q))
    assert all(bool((b <= a * (1 + 1e-5)).all()) for a, b in itertools.pairwise(seen))
    assert seen[-1].sum() < 0.7 * seen[0].sum()
    best = seen[-1] * (1 - 1e-5)
    kind = TYPES[spec.dtype]
    for column, step in itertools.product(range(0, 128, 9), (-1, 1)):
        other = q.float()
        other[:, column] += step * (kind.storage == torch.int8 or other[:, column].abs() / 8)
        other = other.clamp(kind.q_min, kind.q_max).to(kind.storage)
        assert bool((errors(other) >= best).all())


def test_sweeps_after_gptq_lower_the_error_further(tiny_llama, tmp_path):
    plan = make_plan(tiny_llama, tmp_path, PRESETS["fp8_block"], methods=(GPTQSpec(),))
    work, found = observed_work(plan), []
    for sweeps in (0, 2):
        method = solved(work, GPTQ(GPTQSpec(sweeps=sweeps)))
        found.append(
            {
                name: output_errors(
                    work.block.linears[name].weight - layer.dequantized(), work.second_moments(name)
                ).sum()
                for name, layer in method.solved.items()
            }
        )
    assert all(found[1][name] < error for name, error in found[0].items())
    plan = make_plan(tiny_llama, tmp_path, PRESETS["w4"], methods=(GPTQSpec(sweeps=2),))
    assert "2 sweeps of descent after it" in "\n".join(explain(plan))


@pytest.mark.parametrize("block_size", [1, 7, 32, 100])
def test_lazy_updates_change_nothing(block_size):
    weight, hessian = problem()
    scale, zeros = choose_qparams(weight, W4, torch.float32)
    factor, _ = inverse_factor(hessian, 0.01) or pytest.fail("not factored")
    whole, lazy = (
        gptq(weight, scale, zeros, W4, factor, torch.arange(128), size)
        for size in (128, block_size)
    )
    assert (whole == lazy).float().mean() > 0.99


def test_the_factor_is_that_of_the_inverse():
    _, hessian = problem()
    found = inverse_factor(hessian, 0.1)
    assert found is not None
    upper, damp = found
    assert damp == 0.1
    assert torch.equal(upper, upper.triu())
    damped = hessian.double() + 0.1 * hessian.diagonal().mean() * torch.eye(128)
    product = upper.double().T @ upper.double() @ damped
    assert torch.allclose(product, torch.eye(128, dtype=torch.float64), atol=1e-4)


def test_a_gpu_finds_the_factor_by_another_way(monkeypatch):
    monkeypatch.setattr(gptq_module, "SOLVED_WHOLE", 24)
    _, hessian = problem()
    damped = hessian.double() + torch.eye(128)
    one, other = gptq_module._twice(damped), gptq_module._backwards(damped)
    assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
    assert torch.equal(other, other.triu())
    assert gptq_module._backwards(damped - 1e6 * torch.eye(128)) is None


def test_damping_climbs_until_the_hessian_factors():
    indefinite = torch.diag(torch.tensor([1.0, 1.0, -0.5]))
    found = inverse_factor(indefinite, 0.01)
    assert found is not None
    assert found[1] == pytest.approx(10.0)
    assert inverse_factor(torch.diag(torch.tensor([1.0, -1.0, -1.0])), 0.01) is None


def test_layers_of_one_input_are_solved_as_each_alone(tiny_llama, tmp_path):
    work = observed_work(make_plan(tiny_llama, tmp_path, PRESETS["w4"], methods=(GPTQSpec(),)))
    method = solved(work, GPTQ(GPTQSpec()))
    together = dict(method.solved)
    name = "model.layers.0.self_attn.k_proj"
    assert set(together) == set(work.targets)
    [(_, alone)] = list(method._solve(work, [name], method._factor(work, name)))
    assert torch.equal(together[name].weight.q, alone.weight.q)
    method.commit(work)
    assert list(work.quantized) == list(work.targets)


def test_it_beats_rounding_in_every_layer(tiny_llama, tmp_path):
    work = observed_work(make_plan(tiny_llama, tmp_path, PRESETS["w4"], methods=(GPTQSpec(),)))
    method = solved(work, GPTQ(GPTQSpec(scale="absmax")))
    for name, layer in method.solved.items():
        weight, hessian = work.block.linears[name].weight, work.second_moments(name)
        stored = layer.weight
        plain = quantize(weight, stored.scale, TYPES["int4"], None, layer.spec.block)
        ours, theirs = (
            output_errors(weight - dequantize(q, stored.scale), hessian).sum()
            for q in (stored.q, plain)
        )
        assert ours < theirs


def test_dead_inputs_and_a_fallback_are_handled(tiny_llama, tmp_path):
    """A layer whose inputs are mostly zero still solves; what does not factor is rounded."""

    def kill(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][:200] = 0

    model = edit_model(tiny_llama, tmp_path / "dead", kill)
    work = observed_work(make_plan(model, tmp_path / "out", PRESETS["w4"], methods=(GPTQSpec(),)))
    method = solved(work, GPTQ(GPTQSpec()))
    assert torch.isfinite(method.solved["model.layers.0.mlp.down_proj"].dequantized()).all()
    name = "model.layers.0.self_attn.o_proj"
    work.seen.moments._sums[name] = -torch.eye(128)
    [(_, layer)] = list(method._solve(work, [name], method._factor(work, name)))
    weight = work.block.linears[name].weight
    assert torch.equal(layer.weight.q, quantize(weight, layer.weight.scale, TYPES["int4"]))
    assert [event.kind for event in work.events if event.module == name] == ["fallback"]


def test_every_integer_scheme_goes_through(tiny_llama, tmp_path):
    for group, symmetric in itertools.product((32, 64, 128), (True, False)):
        spec = WeightSpec(dtype="int4", granularity="group", group_size=group, symmetric=symmetric)
        plan = make_plan(tiny_llama, tmp_path, Scheme(weights=spec), methods=(GPTQSpec(),))
        work, method = observed_work(plan), GPTQ(GPTQSpec())
        observe(work, [method])
        method.solve(work)
        assert all(x.weight.q.min() >= -8 and x.weight.q.max() <= 7 for x in method.solved.values())


def test_schemes_that_no_kernel_runs_are_refused():
    for weights, word in (
        ({"dtype": "int4", "granularity": "group", "group_size": 16}, "group_size"),
        ({"dtype": "fp8_e4m3", "granularity": "group", "group_size": 128}, "groups"),
        ({"dtype": "fp8_e4m3", "symmetric": False}, "zero point"),
        ({"dtype": "int8", "granularity": "block"}, "per_channel"),
        ({"dtype": "int8", "symmetric": False, "zero_points": "float"}, "in groups"),
    ):
        refused(word, WeightSpec, **weights)
    refused("same kind", Scheme, weights=WeightSpec(dtype="fp8_e4m3"), activations=ActivationSpec())
    refused("per_token", Scheme, weights=WeightSpec(dtype="int4"), activations=ActivationSpec())
    refused("group", Scheme, weights=WeightSpec(dtype="fp8_e4m3", granularity="block"))
