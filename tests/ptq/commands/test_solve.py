"""Solving again from a run's statistics gives what a run of its own would give."""

import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from calibrate.spec import ObserverSpec
from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from ptq.commands.solve import main
from ptq.methods.awq import AWQSpec
from ptq.methods.clip import ClipSpec
from ptq.methods.common.events import SmoothingRow
from ptq.methods.gptq import GPTQSpec
from ptq.methods.refine import RefineSpec
from ptq.methods.rotation import RotationSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.shift import ShiftSpec
from ptq.methods.smooth_k import SmoothKSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.pipeline.artifact import HESSIANS_FOLDER, Artifact
from ptq.pipeline.driver import solve
from ptq.pipeline.reuse import solve_notes
from ptq.plan import machine
from ptq.plan.plan import build_plan
from ptq.recipe.reading import load_recipe
from ptq.recipe.schema import ModelSpec, ObserversSpec, OutputSpec, StatisticsSpec
from tests.ptq.quantizing import (
    add_outliers,
    edit_model,
    executed,
    make_plan,
    observed_work,
    quantized,
)
from tests.refusals import refused_checkpoint, refused_recipe

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
RTN = (RTNSpec(),)
PERCENTILE = ObserverSpec(method="percentile", percentile=99.0)
AVERAGED = ObserverSpec(method="averaged_absmax")


@pytest.fixture(scope="module")
def seen(tiny_llama, tmp_path_factory) -> Artifact:
    """A run that keeps everything."""
    statistics = StatisticsSpec(hessians=True)
    return ran(tiny_llama, tmp_path_factory.mktemp("seen"), methods=RTN, statistics=statistics)


def ran(model: Path, folder: Path, *given, **named) -> Artifact:
    """A run in a folder of what `make_plan` makes of the others, as it is kept."""
    quantized(model, folder / "run", *given, **named)
    return Artifact.load(folder / "run")


def files(result) -> list[bytes]:
    folder = result.checkpoint
    names = ("model.safetensors", "quant/kv_scales.safetensors", "config.json")
    return [(folder / name).read_bytes() for name in names if (folder / name).is_file()]


@pytest.mark.parametrize(
    ("scheme", "methods", "observers"),
    [
        ("a8w8c8", RTN, None),
        ("a8w8c8", RTN, ObserversSpec(input=PERCENTILE, kv_cache=AVERAGED)),
        ("a8w8", RTN, ObserversSpec(input=AVERAGED)),
        ("c8", (), ObserversSpec(kv_cache=ObserverSpec(method="mse"))),
        ("w4", (GPTQSpec(),), None),
        ("w4", (RTNSpec(scale="weighted_mse"),), None),
        ("a8w4_two_level", (GPTQSpec(),), None),
    ],
)
def test_it_equals_a_run_of_its_own(seen, tiny_llama, tmp_path, scheme, methods, observers):
    options = {"methods": methods, "observers": observers}
    run = quantized(tiny_llama, tmp_path / "run", scheme, **options)
    solved = solve(
        make_plan(tiny_llama, tmp_path / "solved", scheme, **options), seen, progress=False
    )
    assert files(solved) == files(run)
    scales = [
        [e.model_copy(update={"sqnr_db": None}) for e in r.scale_table.entries]
        for r in (run, solved)
    ]
    assert scales[0] == scales[1]
    assert Artifact.load(tmp_path / "solved").statistics == seen.statistics


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_is_solved_again_from_its_run(name, tiny_llama, tmp_path):
    """To the same bytes, but for gradient descent, which is refused with what to do."""
    shipped = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    short = {"search_samples": 2, "iterations": 2}
    methods = tuple(
        m.model_copy(update={k: v for k, v in short.items() if hasattr(m, k)})
        for m in shipped.methods
    )
    plans = []
    for folder in ("run", "solved"):
        update = {
            "model": ModelSpec(path=tiny_llama),
            "output": OutputSpec(path=tmp_path / folder),
            "methods": methods,
        }
        recipe = shipped.model_copy(update=update)
        plans.append(build_plan(recipe, Checkpoint.open(tiny_llama), force=True))
    run = executed(plans[0])
    artifact = Artifact.load(tmp_path / "run")
    if name == "w4_best":
        with pytest.raises(RecipeError, match="refine runs samples through the model") as caught:
            solve(plans[1], artifact, progress=False)
        words = shlex.split(str(caught.value))
        setting = words[words.index("--set") + 1].rstrip(",")
        without = load_recipe(ROOT / "recipes" / f"{name}.yaml", [setting]).methods
        assert without == (GPTQSpec(sweeps=2),)
        plan = make_plan(tiny_llama, tmp_path / "solved", "w4", methods=without)
        assert solve(plan, artifact, progress=False).modules
        return
    solved = solve(plans[1], artifact, progress=False)
    assert files(solved) == files(run)
    assert solved.smoothing == run.smoothing
    assert solved.events == tuple(e for e in run.events if e.kind != "worse_than_baseline")


@pytest.mark.parametrize(
    ("methods", "observers"),
    [
        ((ShiftSpec(), SmoothQuantSpec(search_samples=2), SmoothKSpec(), RTNSpec()), None),
        ((ShiftSpec(), GPTQSpec()), None),
        ((SmoothQuantSpec(search_samples=2), ClipSpec(search_samples=2), RTNSpec()), None),
        ((SmoothQuantSpec(search_samples=2), GPTQSpec()), ObserversSpec(input=PERCENTILE)),
    ],
)
def test_what_searches_found_is_taken_with_what_was_seen_after_it(
    tiny_llama, tmp_path, methods, observers
):
    options = {"methods": methods, "observers": observers}
    expected = quantized(tiny_llama, tmp_path / "run", **options)
    artifact = Artifact.load(tmp_path / "run")
    found = solve(make_plan(tiny_llama, tmp_path / "solved", **options), artifact, progress=False)
    assert files(found) == files(expected)
    again = Artifact.load(tmp_path / "solved")
    assert again.statistics == artifact.statistics
    assert again.found.tensors.keys() == artifact.found.tensors.keys()


def test_factors_hold_for_another_scheme_and_ranges_do_not(tiny_llama, tmp_path):
    smooth, clip = SmoothQuantSpec(search_samples=2), ClipSpec(search_samples=2)
    artifact = ran(tiny_llama, tmp_path, methods=(smooth, clip, RTNSpec()))
    other = make_plan(tiny_llama, tmp_path / "a8w4", "a8w4", methods=(smooth, RTNSpec()))
    solved = solve(other, artifact, progress=False)
    assert solved.smoothing == artifact.record.smoothing
    (note,) = solve_notes(artifact, other.recipe)
    assert note == "smoothquant: as that run found it, searched for its own scheme"
    for scheme, changed, message in (
        ("a8w8", (smooth, clip), "the ranges that it found hold for that run's scheme only"),
        ("a8w8c8", (clip,), "the methods before it are not those of that run"),
        ("a8w8c8", (smooth.model_copy(update={"search_samples": 3}),), "search_samples: 2"),
    ):
        methods = (*changed, RTNSpec())
        plan = make_plan(tiny_llama, tmp_path / "refused", scheme, methods=methods)
        refused_recipe(message, solve, plan, artifact, progress=False)


def test_a_float_block_gets_the_factors_of_a_finished_run(tiny_llama, tmp_path):
    plan = make_plan(tiny_llama, tmp_path / "run", methods=(SmoothQuantSpec(alpha=0.7), RTNSpec()))
    executed(plan)
    work = observed_work(plan)
    before = [work.block.run(sample) for sample in range(2)]
    weight = work.block.linears["model.layers.0.mlp.down_proj"].weight.clone()
    Artifact.load(tmp_path / "run").fold(work, plan.recipe)
    assert not torch.equal(work.block.linears["model.layers.0.mlp.down_proj"].weight, weight)
    for sample, y in enumerate(before):
        assert (work.block.run(sample) - y).norm() < 1e-4 * y.norm()


def test_large_second_moments_are_kept_where_they_are_asked_for(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "KEPT_MOMENTS", 1000)
    artifact = ran(tiny_llama, tmp_path, "w4", methods=(GPTQSpec(),))
    plan = make_plan(tiny_llama, tmp_path / "run", "w4", methods=(GPTQSpec(),))
    with pytest.raises(
        RecipeError, match=r"keeps those that its methods use where .*hessians=true"
    ):
        solve(plan, artifact, force=True, progress=False)


def test_smoothing_follows_from_maxima(seen, tiny_llama, tmp_path):
    """With its source divided and every static scale known without running it."""
    methods = (SmoothQuantSpec(alpha=0.7), RTNSpec())
    plan = make_plan(tiny_llama, tmp_path / "solved", methods=methods)
    solved = solve(plan, seen, progress=False)
    assert {row.alpha for row in solved.smoothing} == {0.7}
    assert {row.error for row in solved.smoothing} == {None}
    again = quantized(tiny_llama, tmp_path / "run", methods=methods)
    kept = [row.source for row in again.smoothing if row.alpha is None]  # a run may decide not to
    stored, expected = (load_file(r.checkpoint / "model.safetensors") for r in (solved, again))
    compared = 0
    for row in solved.smoothing:
        if row.source in kept or any(
            c.rpartition(".")[0] in s for s in kept for c in row.consumers
        ):
            continue
        for consumer in row.consumers:
            for leaf in ("weight", "weight_scale", "input_scale"):
                name = f"{consumer}.{leaf}"
                assert torch.equal(stored[name], expected[name]), name
                compared += 1
    assert compared


def test_what_needs_samples_is_refused_all_at_once(seen, tiny_llama, tmp_path):
    methods = (SmoothQuantSpec(), GPTQSpec(), RefineSpec())
    plan = make_plan(tiny_llama, tmp_path / "a", "w4", methods=methods)
    with pytest.raises(RecipeError) as caught:
        solve(plan, seen, progress=False)
    assert "give alpha a number, such as --set methods.0.smoothquant.alpha=0.5" in str(caught.value)
    assert "refine runs samples" in str(caught.value)
    row = {"method": "smoothquant", "source": "s", "consumers": (), "error": None}
    row |= {"scale_min": 1, "scale_max": 1}
    rows = [SmoothingRow(**row, alpha=alpha, candidates=()) for alpha in (1.0, None, 0.5, 0.85)]
    record = seen.record.model_copy(update={"smoothing": tuple(rows)})
    with pytest.raises(RecipeError, match=r"alpha=0\.85 \(the middle of those found\)"):
        solve(plan, replace(seen, record=record), progress=False)
    assert not (tmp_path / "a").exists()
    plan = make_plan(tiny_llama, tmp_path / "a", "w4", methods=(AWQSpec(), RTNSpec()))
    refused_recipe("awq runs samples", solve, plan, seen, progress=False)
    plan = make_plan(
        tiny_llama,
        tmp_path / "a",
        methods=(SmoothQuantSpec(alpha=0.5), RTNSpec()),
        observers=ObserversSpec(input=PERCENTILE),
    )
    refused_recipe("only maxima are known", solve, plan, seen, progress=False)


def test_what_a_run_did_not_keep_is_refused_with_the_setting(tiny_llama, tmp_path):
    lean = ran(tiny_llama, tmp_path / "lean", "w8", methods=RTN)
    plan = make_plan(tiny_llama, tmp_path / "out", "w4", methods=(GPTQSpec(),))
    with pytest.raises(RecipeError) as caught:
        solve(plan, lean, progress=False)
    assert "statistics.hessians=true" in str(caught.value)
    assert "statistics.histograms=true" in str(caught.value)
    statistics = StatisticsSpec(histograms=True)
    kept = ran(tiny_llama, tmp_path / "kept", "w8", methods=RTN, statistics=statistics)
    observers = ObserversSpec(kv_cache=PERCENTILE)
    plan = make_plan(tiny_llama, tmp_path / "out", "c8", methods=(), observers=observers)
    solve(plan, kept, progress=False)


def test_another_model_and_damage_are_refused(seen, tiny_llama, tmp_path):
    other = edit_model(tiny_llama, tmp_path / "other", add_outliers)
    with pytest.raises(RecipeError, match="is not the model"):
        solve(make_plan(other, tmp_path / "out", methods=RTN), seen, progress=False)
    turned = make_plan(tiny_llama, tmp_path / "out", methods=(RotationSpec(), *RTN))
    with pytest.raises(RecipeError, match="rotate the model otherwise than that run's"):
        solve(turned, seen, progress=False)
    folder = tmp_path / "copy"
    shutil.copytree(seen.folder, folder)
    path = next((folder / HESSIANS_FOLDER).iterdir())
    path.write_bytes(path.read_bytes()[:100])
    plan = make_plan(tiny_llama, tmp_path / "out", "w4", methods=(GPTQSpec(),))
    refused_checkpoint(path.name, solve, plan, Artifact.load(folder), progress=False)
    assert not (tmp_path / "out" / "checkpoint").exists()


def test_hessians_of_an_earlier_run_are_not_taken_for_those_of_the_next(tiny_llama, tmp_path):
    for keep in (True, False):
        plan = make_plan(
            tiny_llama, tmp_path / "run", methods=RTN, statistics=StatisticsSpec(hessians=keep)
        )
        executed(plan, force=True)
        assert (tmp_path / "run" / HESSIANS_FOLDER).is_dir() == keep


def test_the_command(seen, tmp_path, capsys):
    output = tmp_path / "again"
    arguments = [str(seen.folder), "--output", str(output)]
    assert main([*arguments, "--set", "observers.kv_cache.method=percentile"]) == 0
    assert "ptq report" in capsys.readouterr().out
    assert (output / "checkpoint" / "config.json").is_file()
    with pytest.raises(RecipeError, match="calibration differ"):
        main([*arguments, "--force", "--set", "dataset.calibration.samples=9"])


def test_a_shipped_recipe_is_taken_for_the_model_and_data_of_the_run(seen, tmp_path):
    run = load_recipe(seen.folder / "recipe.yaml")
    shipped = load_recipe("w8_rtn")
    assert (shipped.model, shipped.dataset) != (run.model, run.dataset)
    folder = tmp_path / "w8"
    arguments = [str(seen.folder), "--output", str(folder), "--recipe"]
    for name in ("w8_rtn", str(ROOT / "recipes" / "w8_rtn.yaml")):
        assert main([*arguments, name, "--force"]) == 0
        solved = load_recipe(folder / "recipe.yaml")
        assert (solved.model, solved.dataset) == (run.model, run.dataset)
        assert Checkpoint.open(folder / "checkpoint").scheme.wac == "w8"
    with pytest.raises(RecipeError, match="calibration differ"):
        main([*arguments, "w8_rtn", "--set", "dataset.calibration.samples=9"])
    own = tmp_path / "own.yaml"  # a recipe of one's own means the data that it names
    own.write_text("base: w8_rtn\n")
    refused_recipe("calibration differ", main, [*arguments, str(own)])
