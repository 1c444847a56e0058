"""A recipe that keeps recurrent states in int8: plan, checkpoint, report, and where it has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calibrate.data import load_tokens
from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from formats.scheme import PRESETS, Scheme
from inference.accuracy import compare
from inference.engine import Engine
from ptq import cli
from ptq.pipeline.driver import quantize
from ptq.plan.describe import describe_plan
from ptq.plan.plan import build_plan
from ptq.recipe.reading import load_recipe
from ptq.report.report import make_report
from tests.inference.transformers_code.test_kept_states import SMALL, write_remembering
from tests.ptq.quantizing import ACCURACY, write_recipe


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    model = write_remembering("qwen3_next", folder / "model", SMALL)
    keys = {"scheme": "w8s8", "output": {"path": str(folder / "out")}, "report": ACCURACY}
    write_recipe(folder, model, length=200, **keys)
    return folder


@pytest.fixture
def made(here, unpictured):
    recipe = load_recipe(here / "r.yaml")
    plan = build_plan(recipe, Checkpoint.open(recipe.model.path), force=True)
    result = quantize(plan, progress=False, force=True)
    return plan, make_report(result, plan, progress=False)


def test_a_run_keeps_states_in_int8_and_reports_what_that_loses(here, made, capsys):
    plan, report = made
    assert any(
        line.startswith("  recurrent states: int8 by row") for line in describe_plan(plan, {})
    )
    out, data = here / "out" / "checkpoint", report.data
    assert json.loads((out / "config.json").read_text())["ptq"]["states"] == {"dtype": "int8"}
    assert Checkpoint.open(out, verify=True).scheme == PRESETS["w8s8"]
    assert data.scheme == "w8s8"

    original, quantized = (Engine.from_pretrained(path) for path in (here / "model", out))
    floats = Engine.from_pretrained(out, quantized_kv=False)
    dataset = load_recipe(here / "r.yaml").dataset
    sequences = load_tokens(dataset, original.tokenizer, "evaluation").sequences()
    assert data.states.accuracy == compare(floats, quantized, sequences)
    assert data.states.accuracy.kl_mean > 0
    assert data.accuracy == compare(original, quantized, sequences)
    rows = {row[0]: row for row in report.summary_rows}
    assert rows["mean KL of int8 states"][2] == f"{data.states.accuracy.kl_mean:.2g}"
    heads, rest = 4 * 32 * 16, (2 * 2 * 32 + 4 * 16) * 4  # elements; a convolution of 4 tokens
    assert data.states.float_bytes == 4 * heads + 4 * rest
    assert data.states.int8_bytes == heads + 4 * 4 * (32 + 16) + 4 * rest

    assert cli.main(["inspect", str(out)]) == 0
    assert "recurrent states: int8 by row and column" in capsys.readouterr().out


def test_a_model_without_recurrent_states_is_refused(here, tiny_llama):
    recipe = load_recipe(here / "r.yaml", [f"model.path={tiny_llama}"])
    with pytest.raises(RecipeError, match=r"scheme\.states: 'llama' keeps no recurrent states"):
        build_plan(recipe, Checkpoint.open(recipe.model.path))


def test_groups_that_layers_settle_leave_it_as_it_is(here):
    recipe = load_recipe(here / "r.yaml", ["scheme=w4s8"])
    plan = build_plan(recipe, Checkpoint.open(recipe.model.path), force=True)
    assert plan.recipe.scheme.wac == "w4s8"


def test_single_layers_have_no_states_of_their_own(here):
    settings = ["layers=[{match: ['re:.*q_proj'], scheme: w4s8}]"]
    with pytest.raises(RecipeError, match="found kept states in the scheme of single layers"):
        load_recipe(here / "r.yaml", settings)


def test_what_is_not_kept_in_int8_is_not_said():
    assert "states" not in PRESETS["a8w8c8"].model_dump()
    for name in ("s8", "w8s8", "w4s8", "a8w8s8_dynamic"):
        scheme = PRESETS[name]
        assert scheme.wac == name
        assert Scheme.model_validate_json(scheme.model_dump_json()) == scheme
    both = PRESETS["a8w8c8"].model_copy(update={"states": PRESETS["s8"].states})
    assert both.wac == "a8w8c8s8"
