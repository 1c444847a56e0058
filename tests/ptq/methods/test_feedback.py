"""What rounding with feedback is expected to cost, beside what it costs once it is solved for."""

import pytest
import torch

from calibrate.gradients import FisherFactors, diagonal_blocks
from formats.scheme import PRESETS
from kernels.numerics import dequantize
from ptq.methods.common.rounding import round_weight
from ptq.methods.common.with_feedback import Feedback, amplified
from ptq.methods.gptq import GPTQ, GPTQSpec, inverse_factor
from ptq.methods.two_sided import TwoSided, TwoSidedSpec
from tests.ptq.methods.test_two_sided import SPECS, W4, fisher_work, matrix
from tests.ptq.quantizing import make_plan


def test_errors_of_a_step_cost_what_the_rest_cannot_make_up_for():
    metric, order = matrix(48, 3), torch.randperm(48, generator=torch.Generator().manual_seed(4))
    found = inverse_factor(metric[order][:, order], 1e-9)
    assert found is not None
    known = amplified(found[0], order, metric)
    assert known.shape == (48,)
    exact = metric.double()
    for place in (0, 17, 47):
        later = order[place + 1 :]
        cross, rest = exact[order[place], later], exact[later][:, later]
        least = exact[order[place], order[place]] - cross @ torch.linalg.solve(rest, cross)
        assert known[order[place]].item() == pytest.approx(least.item(), rel=1e-3)


@pytest.mark.parametrize("scheme", ["w4", "w8"])
@pytest.mark.parametrize("method", [TwoSided(TwoSidedSpec()), GPTQ(GPTQSpec())])
def test_it_comes_near_what_the_layers_of_a_block_cost(tiny_llama, tmp_path, scheme, method):
    work = fisher_work(make_plan(tiny_llama, tmp_path, PRESETS[scheme], methods=(method.spec,)))
    expected = dict(method.feedback(work))
    method.solve(work)
    assert set(expected) == set(work.targets)
    for name, feedback in expected.items():
        weight = work.block.linears[name].weight
        found = feedback.kl(weight, work.weight_spec(name), work.scale_dtype(name)).item()
        solved = work.fisher(name).kl(weight - method.solved[name].dequantized()).item()
        assert 0.7 < found / solved < 1.4, name


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
def test_without_feedback_it_is_the_cost_of_independent_errors(spec):
    weight = torch.randn(72, 256, generator=torch.Generator().manual_seed(0))
    rows, columns = torch.rand(72) / 72, torch.rand(256)
    feedback = Feedback(rows, columns, "absmax", torch.eye(256))
    found = feedback.kl(weight, spec, torch.float32).item()
    stored = round_weight(weight, spec, torch.float32)
    error = weight - dequantize(stored.q, stored.scale, stored.zero_point, spec.block)
    factors = FisherFactors(torch.diag(columns), torch.diag(rows)[None])
    assert found == pytest.approx(factors.kl(error).item(), rel=1e-5)


def test_some_rows_stand_for_all_of_a_large_weight():
    weight = torch.randn(1536, 128, generator=torch.Generator().manual_seed(0))
    rows = torch.linspace(1, 3, 1536)
    found = Feedback(rows, torch.ones(128), "mse", torch.eye(128)).kl(weight, W4, torch.float32)
    each = torch.zeros(1, dtype=torch.float64)
    for own, part in zip(rows.split(256), weight.split(256), strict=True):  # all of so few count
        each += Feedback(own, torch.ones(128), "mse", torch.eye(128)).kl(part, W4, torch.float32)
    assert found.item() == pytest.approx(each.item(), rel=0.03)


def test_diagonal_blocks_are_cut_and_filled_up():
    whole = matrix(72, 5)
    first, second = diagonal_blocks(whole, 40)
    assert torch.equal(first, whole[:40, :40])
    assert torch.equal(second[:32, :32], whole[40:, 40:])
    assert not second[32:].any()
    assert not second[:, 32:].any()
