"""Methods that need gradients find the Fisher factors of the weights as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from calibrate.gradients import FisherFactors
from formats.errors import RecipeError
from ptq.methods.gptq import GPTQ, GPTQSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.smooth_k import SmoothKSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.output import GRADIENTS_FOLDER, unfinished
from ptq.pipeline import driver as pipeline
from ptq.pipeline import gradients, solver
from ptq.pipeline.artifact import FISHER_FOLDER, Artifact
from ptq.pipeline.resume import ResumableRun
from ptq.plan import modules
from ptq.recipe.schema import StatisticsSpec
from tests.ptq.quantizing import Stop, executed, make_plan, quantized


@pytest.fixture
def seen(monkeypatch) -> dict[str, FisherFactors]:
    """Factors that GPTQ finds, as if it needed gradients; its weights and those before it."""
    found: dict[str, FisherFactors] = {}
    solve = GPTQ.solve

    def look(self, work):
        found.update({name: work.fisher(name) for name in work.targets})
        solve(self, work)

    monkeypatch.setattr(GPTQ, "gradients", True)
    monkeypatch.setattr(GPTQ, "solve", look)
    return found


def quantize(model: Path, output: Path, scheme: str = "w4", methods: tuple = (GPTQSpec(),), **keys):
    return quantized(model, output, scheme, methods=methods, **keys)


def test_factors_are_found_and_kept(tiny_llama, tmp_path, seen):
    result = quantize(tiny_llama, tmp_path)
    assert result.seconds["backward"] > 0
    found = dict(seen)
    assert len(found) == 14
    for factors in found.values():
        assert torch.linalg.eigvalsh(factors.inputs).min() > -1e-5 * factors.inputs.trace()
        assert factors.outputs.diagonal(dim1=1, dim2=2).sum().item() == pytest.approx(1, rel=1e-5)
    assert not (tmp_path / GRADIENTS_FOLDER).exists()
    assert len(list((tmp_path / FISHER_FOLDER).iterdir())) == 2
    seen.clear()
    plan = make_plan(tiny_llama, tmp_path / "again", "w4", methods=(GPTQSpec(),))
    pipeline.solve(plan, Artifact.load(tmp_path), progress=False)
    assert seen.keys() == found.keys()
    for name, factors in seen.items():
        assert torch.equal(factors.inputs, found[name].inputs)
        assert torch.equal(factors.outputs, found[name].outputs)


def test_an_error_costs_the_same_whatever_is_folded(tiny_llama, tmp_path, seen, monkeypatch):
    """Rows of v, up, q and k, and columns of all, are divided: KL = 1/2 tr(E^T G E A) stays."""
    costs: list[dict[str, float]] = []

    def cost(work, weights):
        layers = work.block.linears
        return {n: work.fisher(n).kl(layers[n].weight * weights[n]).item() for n in work.targets}

    see = solver.BlockSolver.see

    def before(self, work, methods, team=None, first=0):
        outcome = see(self, work, methods, team, first)
        if first:
            return outcome
        generator = torch.Generator().manual_seed(0)
        shares = {
            n: torch.randn(work.block.linears[n].weight.shape, generator=generator)
            for n in work.targets
        }
        work.shares = shares
        costs.append(cost(work, shares))
        return outcome

    look = GPTQ.solve

    def after(self, work):
        costs.append(cost(work, work.shares))
        look(self, work)

    monkeypatch.setattr(solver.BlockSolver, "see", before)
    monkeypatch.setattr(GPTQ, "solve", after)
    smooth = (SmoothQuantSpec(alpha=0.8), SmoothKSpec(alpha=0.9), GPTQSpec())
    quantize(tiny_llama, tmp_path, "a8w8c8", smooth)
    assert len(costs) == 4
    for came, folded in zip(costs[::2], costs[1::2], strict=True):
        for name, expected in came.items():
            assert folded[name] == pytest.approx(expected, rel=1e-3), name


def test_a_run_stopped_after_its_backward_pass_takes_what_is_there(
    tiny_llama, tmp_path, seen, monkeypatch
):
    expected = quantize(tiny_llama, tmp_path / "whole")
    plan = make_plan(tiny_llama, tmp_path / "out", "w4", methods=(GPTQSpec(),))

    def stop(self, *_):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(ResumableRun, "save", stop)
        with pytest.raises(Stop):
            executed(plan)
    assert unfinished(tmp_path / "out")

    def never(*_, **__):
        raise AssertionError("it ran backward again")

    monkeypatch.setattr(gradients, "backward", never)
    found = executed(plan)
    for name in ("model.safetensors", "config.json"):
        assert (found.checkpoint / name).read_bytes() == (expected.checkpoint / name).read_bytes()


def test_gradients_are_kept_when_asked_for_and_else_refused(tiny_llama, tmp_path, monkeypatch):
    methods = (RTNSpec(),)
    asked = StatisticsSpec(gradients=True)
    quantize(tiny_llama, tmp_path / "asked", methods=methods, statistics=asked)
    quantize(tiny_llama, tmp_path / "plain", "a8w8c8", methods=methods)
    assert (tmp_path / "asked" / FISHER_FOLDER).is_dir()
    monkeypatch.setattr(GPTQ, "gradients", True)
    monkeypatch.setattr(GPTQ, "moments", "none")
    plan = make_plan(tiny_llama, tmp_path / "again", "w4", methods=(GPTQSpec(),))
    with pytest.raises(RecipeError, match="statistics.gradients=true"):
        pipeline.solve(plan, Artifact.load(tmp_path / "plain"), progress=False)


def test_tokens_beyond_the_limit_weigh_as_the_others_on_average(tiny_llama, tmp_path, seen):
    quantize(tiny_llama, tmp_path / "all")
    whole = dict(seen)
    quantize(tiny_llama, tmp_path / "few", statistics=StatisticsSpec(gradient_tokens=100))
    for name, factors in seen.items():
        ratio = factors.inputs.trace() / whole[name].inputs.trace()
        assert 0.5 < ratio < 2, name
        assert not torch.equal(factors.outputs, whole[name].outputs)


def test_pieces_of_a_head_share_its_factors(tiny_llama, tmp_path, seen, monkeypatch):
    """G of some rows is a part of that of all, and the costs of the pieces add up."""
    costs: dict[str, float] = {}

    def solve(output: Path) -> Artifact:
        result = quantize(tiny_llama, output, ignore=(), layers={"lm_head": "w4"})
        assert result.blocks[-1].block == "lm_head"
        return Artifact.load(output)

    look = GPTQ.solve

    def cost(self, work):
        look(self, work)
        for name in work.targets:
            error = work.block.linears[name].weight
            costs[name] = costs.get(name, 0) + work.fisher(name).kl(error).item()

    monkeypatch.setattr(GPTQ, "solve", cost)
    whole = solve(tmp_path / "whole")
    total = costs.pop("lm_head")
    monkeypatch.setattr(modules, "PIECE", 256 * 128)
    solve(tmp_path / "cut")
    assert costs.pop("lm_head") == pytest.approx(total, rel=1e-6)
    options = {"methods": (GPTQSpec(),), "ignore": (), "layers": {"lm_head": "w4"}}
    plan = make_plan(tiny_llama, tmp_path / "solved", "w4", **options)
    pipeline.solve(plan, whole, progress=False)
    assert costs["lm_head"] == pytest.approx(total, rel=1e-6)
