"""A budget from recipe to checkpoint, on a tiny model: counted once, chosen, checked, repeated."""

import json
from pathlib import Path

import pytest
import torch

import ptq
from formats.checkpoint.read import Checkpoint
from formats.families.block_layers import block_of
from ptq import cli
from ptq.methods.costs import CostsSpec
from ptq.methods.gptq import GPTQSpec
from ptq.methods.rtn import RTNSpec
from ptq.pipeline.artifact import Artifact
from ptq.plan.plan import Plan
from ptq.recipe.reading import load_recipe
from ptq.search.costs import Costs, candidates
from ptq.search.search import usual_kl_excess
from tests.ptq.quantizing import ACCURACY, executed, make_plan, weight_bytes, write_recipe


@pytest.fixture(scope="module")
def desk(tmp_path_factory, tiny_llama) -> Path:
    """A folder with a recipe that has a budget, run once."""
    folder = tmp_path_factory.mktemp("budget")
    budget = {"budget": {"kl": 0.002}, "methods": ["two_sided"], "scheme": "w4"}
    output = {"path": str(folder / "out")}
    write_recipe(folder, tiny_llama, 4, 48, **budget, output=output, report=ACCURACY)
    assert cli.main(["run", str(folder / "r.yaml"), "--quiet"]) in (0, 1)
    return folder


def record(folder: Path) -> dict:
    return json.loads((folder / "out" / "report" / "report.json").read_text())


def test_what_was_chosen_is_what_was_measured_and_predicted_in_bytes(desk):
    found, report = record(desk)["budget"], record(desk)
    trial = found["trials"][found["chosen"]]
    assert len(found["trials"]) <= 2
    assert trial["kl"] == report["accuracy"]["kl_mean"]
    folder = desk / "out" / "checkpoint"
    assert Checkpoint.open(folder).nbytes <= trial["nbytes"] < 1.02 * weight_bytes(folder)
    first = found["trials"][0]
    assert first["foretold"] == usual_kl_excess("two_sided") * first["predicted"]
    shown = (desk / "out" / "report" / "report.html").read_text()
    assert all(f"{trial[key]:.5f}" in shown for key in ("foretold", "kl"))
    labels = [group["label"].rpartition(".")[2] for group in found["costs"]["groups"]]
    assert set(labels) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"}
    assert "The budget: kl=0.002" in (desk / "out" / "report" / "report.html").read_text()


def test_the_recipe_of_the_choice_repeats_it(desk, tmp_path):
    recipe = load_recipe(desk / "out" / "recipe.yaml")
    assert recipe.budget is None
    assert recipe.report.thresholds.kl == 0.002
    words = [
        "run",
        str(desk / "out" / "recipe.yaml"),
        "--output",
        str(tmp_path / "again"),
        "--quiet",
    ]
    assert cli.main(words) in (0, 1)
    first, second = (Checkpoint.open(p / "checkpoint") for p in (desk / "out", tmp_path / "again"))
    assert first.names() == second.names()
    assert all(torch.equal(first.tensor(name), second.tensor(name)) for name in first.names())


def test_another_budget_takes_the_costs_that_are_there(desk, monkeypatch, capsys):
    monkeypatch.setattr("ptq.pipeline.driver.quantize_tokens", None)
    words = ["run", str(desk / "r.yaml"), "--set", "budget={bits: 6}", "--force", "--quiet"]
    assert cli.main(words) == 0
    assert "measured KL, for bits=6" in capsys.readouterr().out
    found = record(desk)["budget"]
    costs = Costs.model_validate_json(json.dumps(found["costs"]))
    trial = found["trials"][0]
    assert trial["schemes"][-1] == "float"
    head = costs.groups[-1].candidates[0].nbytes
    assert 8 * (trial["nbytes"] - costs.fixed_bytes - head) <= 6 * costs.elements


def test_the_weight_file_takes_no_more_bytes_than_ordered(desk):
    size = (desk / "out" / "checkpoint" / "model.safetensors").stat().st_size - 1
    words = [
        "run",
        str(desk / "r.yaml"),
        "--set",
        f"budget={{bytes: {size}}}",
        "--force",
        "--quiet",
    ]
    assert cli.main(words) == 0
    assert record(desk)["sizes"]["quantized_weights"] <= size


@pytest.mark.parametrize("limit", ["bytes: 10kB", "bits: 3.9"])
def test_a_size_that_no_choice_has_is_refused_before_a_sample_runs(
    limit, desk, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("ptq.pipeline.driver.quantize_tokens", None)
    words = ["run", str(desk / "r.yaml"), "--set", f"budget={{{limit}}}", "--output", str(tmp_path)]
    assert cli.main([*words, "--quiet"]) == 2
    assert "no choice takes less than 4." in capsys.readouterr().err


def test_from_python_a_budget_is_kept_as_by_a_run(desk, monkeypatch):
    monkeypatch.setattr("ptq.pipeline.driver.quantize_tokens", None)  # its costs are there
    words = {"overrides": ["budget={bits: 6}"], "force": True, "progress": False}
    made = ptq.quantize(desk / "r.yaml", **words)
    assert made.checkpoint == desk / "out" / "checkpoint"
    recipe = load_recipe(desk / "out" / "recipe.yaml")
    assert recipe.budget is None
    chosen = [recipe.scheme.of_layers, *(entry.scheme for entry in recipe.layers)]
    assert len(chosen) > 1
    assert all(scheme in candidates(recipe.scheme, "cpu").values() for scheme in chosen)


def test_a_method_that_runs_samples_after_rounding_is_refused(desk, capsys):
    methods = 'methods=[{"gptq": {}}, {"refine": {}}]'
    words = ["run", str(desk / "r.yaml"), "--set", methods, "--force"]
    assert cli.main(words) == 2
    assert "leave it out" in capsys.readouterr().err


def plan_shape(plan: Plan, name: str) -> int:
    """Inputs of a layer."""
    return next(module.shape[1] for module in plan.modules if module.name == name)


def test_costs_fall_with_bits_and_count_inputs_and_caches(tiny_llama, tmp_path):
    schemes = tuple(candidates(load_recipe("a8w4").scheme, "cpu").values())
    rounding = GPTQSpec()
    costs = CostsSpec(
        rounding="gptq",
        options=rounding.model_dump(exclude={"name"}),
        schemes=schemes,
        caches=(load_recipe("c8").scheme.kv_cache,),
        samples=2,
    )
    plan = make_plan(tiny_llama, tmp_path / "out", "w8", methods=(costs, RTNSpec()))
    executed(plan)
    tensors = Artifact.load(tmp_path / "out").found.tensors
    weights = [tensors[f"{block_of(n)}/costs/weights/{n}"] for n in plan.quantized]
    for size, cost in zip((128, 64), torch.stack(weights).T, strict=False):
        fits = [plan_shape(plan, name) % size == 0 for name in plan.quantized]
        assert cost.isnan().logical_not().tolist() == fits
    assert all(cost[2] > 20 * cost[-1] > 0 for cost in weights)
    inputs = [t for name, t in tensors.items() if "/inputs/" in name]
    assert all(bool((t > 0).all()) for t in inputs)
    caches = [t for name, t in tensors.items() if "/caches/" in name]
    assert len(caches) == len(plan.blocks)
    assert all(t.shape == (1,) and t.item() > 0 for t in caches)
