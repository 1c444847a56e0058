"""`--adapter`: what is quantized or converted is the model with the adapter merged in."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from formats.adapters import read_lora
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RecipeError, RequestError
from inference.engine import Engine
from ptq.commands import convert as convert_command
from ptq.commands import quantize as quantize_command
from ptq.commands import run
from ptq.convert.convert import convert
from ptq.methods.rtn import RTNSpec
from ptq.plan.plan import plan_recipe
from ptq.recipe.reading import load_recipe, read_recipe, resolved_yaml
from tests.adapters import write_adapter
from tests.conftest import write_quantized
from tests.ptq.quantizing import IDS, executed, make_plan


@pytest.fixture
def desk(tmp_path, monkeypatch, tiny_llama) -> Path:
    """A folder with a model and its adapter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PTQ_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").symlink_to(tiny_llama)
    write_adapter(tmp_path / "lora", tiny_llama)
    return tmp_path


def test_a_recipe_quantizes_the_merged_model(desk, tiny_llama):
    """Bit for bit as the merged model by itself."""
    loaded = read_recipe("w8_rtn", ["model={path: model, adapter: lora}", "output.path=out"])
    plan = plan_recipe(loaded)
    recipe = plan.recipe
    assert recipe.model.adapter == desk / "lora"
    assert "with the adapter" in recipe.model.title
    convert(tiny_llama, desk / "merged", "float", adapter="lora")
    own = make_plan(desk / "merged", desk / "own", "w8", methods=(RTNSpec(),))
    found = make_plan(recipe.model.folder, desk / "out", "w8", methods=(RTNSpec(),))
    weights = [(executed(p).checkpoint / "model.safetensors") for p in (own, found)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_written_recipe_repeats_it(desk):
    recipe = plan_recipe(read_recipe("w8_rtn", ["model={path: model, adapter: lora}"])).recipe
    text = resolved_yaml(recipe)
    assert yaml.safe_load(text)["model"] == {
        "path": str(desk / "model"),
        "adapter": str(desk / "lora"),
    }
    (desk / "again.yaml").write_text(text)
    assert load_recipe("again.yaml") == recipe
    plain = plan_recipe(read_recipe("w8_rtn", ["model.path=model"])).recipe
    assert "adapter" not in yaml.safe_load(resolved_yaml(plain))["model"]


def test_a_path_in_a_recipe_is_relative_to_it(desk):
    (desk / "inner").mkdir()
    text = "base: w8_rtn\nmodel: {path: ../model, adapter: ../lora}\n"
    (desk / "inner" / "mine.yaml").write_text(text)
    assert load_recipe("inner/mine.yaml").model.adapter == desk / "lora"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": "x"}, "r is 'x'"),
        (None, "found no adapter_config.json"),
    ],
)
def test_a_wrong_adapter_is_told_with_its_line(desk, change, words):
    config = desk / "lora" / "adapter_config.json"
    if change is None:
        config.unlink()
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    (desk / "mine.yaml").write_text("base: w8_rtn\nmodel: {path: model, adapter: lora}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("mine.yaml")
    assert "mine.yaml:2" in str(caught.value)
    assert "model.adapter" in str(caught.value)
    assert words in str(caught.value)


def test_a_folder_that_is_not_there(desk):
    with pytest.raises(RecipeError, match="no such folder; did you mean"):
        load_recipe("w8_rtn", ["model={path: model, adapter: ./lorra}"])


def test_an_adapter_of_another_base_is_refused_by_the_plan(desk, make_model):
    write_adapter(desk / "wide", make_model("llama", hidden_size=96))
    loaded = read_recipe("w8_rtn", ["model={path: model, adapter: wide}"])
    with pytest.raises(RecipeError, match="it is of another base") as caught:
        plan_recipe(loaded)
    assert "model.adapter" in str(caught.value)


def test_quantize_puts_it_into_the_recipe(desk, monkeypatch):
    calls: list[list[str]] = []
    monkeypatch.setattr(run, "main", lambda words: calls.append(words) or 0)
    assert quantize_command.main(["model", "--scheme", "w8", "--adapter", "lora"]) == 0
    assert "model.adapter=lora" in calls[0]
    recipe = load_recipe(calls[0][0], [word for word in calls[0] if "=" in word])
    assert recipe.model.adapter == desk / "lora"


def test_convert_merges_into_floats(desk, tiny_llama, capsys):
    assert (
        convert_command.main(["model", "out", "--to", "float", "--adapter", "lora", "--quiet"]) == 0
    )
    assert "The adapter lora is part of its weights." in capsys.readouterr().out
    base, found = Checkpoint.open(tiny_llama), Checkpoint.open(desk / "out")
    lora, module = read_lora("lora", base), "model.layers.0.mlp.up_proj"
    weight = base.tensor(f"{module}.weight")
    assert torch.equal(
        found.tensor(f"{module}.weight"), lora.merged(module, weight).to(weight.dtype)
    )
    engines = [Engine.from_pretrained(path) for path in (tiny_llama, desk / "out")]
    before, after = (engine.score(IDS) for engine in engines)
    assert (before - after).norm() > 0.1 * before.norm()


@pytest.mark.parametrize("preset", ["a8w8", "c8", "w4"])
def test_convert_merges_into_what_was_quantized(desk, tiny_llama, preset):
    quantized = write_quantized(tiny_llama, desk / "q", preset)
    done = convert(quantized, desk / "out", "float", adapter="lora", dtype="float32")
    convert(quantized, desk / "plain", "float", dtype="float32")
    assert done.notes[-1] == "The adapter lora is part of its weights."
    lora = read_lora("lora", Checkpoint.open(quantized))
    plain, found = Checkpoint.open(desk / "plain"), Checkpoint.open(desk / "out")
    for module in lora.modules:
        weight = plain.tensor(f"{module}.weight")
        wanted = lora.merged(module, weight).to(weight.dtype)
        assert torch.equal(found.tensor(f"{module}.weight"), wanted)


def test_options_that_do_not_go_together(desk, tiny_llama):
    with pytest.raises(RequestError, match="--adapter goes with --to float, not with --to gptq"):
        convert(tiny_llama, desk / "out", "gptq", adapter="lora")
    with pytest.raises(RequestError, match="--dtype float16: .* is a float model"):
        convert(tiny_llama, desk / "out", "float", adapter="lora", dtype="float16")
    with pytest.raises(CheckpointError, match="no such folder"):
        convert(tiny_llama, desk / "out", "float", adapter="nothing here")
    assert not (desk / "out").exists()
