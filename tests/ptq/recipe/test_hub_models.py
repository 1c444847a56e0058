"""Recipes whose model is on the hub: pinned to a commit, they repeat the run."""

import os
import subprocess
import sys

import pytest
import yaml

from formats.errors import CheckpointError, RecipeError
from formats.hub import ROOT, _download
from inference import predict
from inference.engine import Engine
from inference.requests.request import SamplingParams
from ptq import cli
from ptq.plan.plan import plan_recipe
from ptq.recipe.reading import read_recipe, resolved_yaml
from tests.hub import COMMITS, point_at, serve_hub


@pytest.fixture(scope="module")
def served():
    with serve_hub() as server:
        server.add("org/tiny", ROOT / "recipes" / "tiny-python")
        yield server


@pytest.fixture
def online(served, tmp_path, monkeypatch):
    """A cache that is empty, and the server for a hub."""
    monkeypatch.chdir(tmp_path)
    point_at(served, tmp_path / "cache", monkeypatch)
    yield served
    _download.cache_clear()


def test_reading_a_recipe_asks_nobody_and_its_plan_pins_the_commit(online, tmp_path):
    loaded = read_recipe("w4_rtn", ["model.path=org/tiny"])
    assert online.asked == []
    recipe = plan_recipe(loaded).recipe
    text = resolved_yaml(recipe)
    assert yaml.safe_load(text)["model"] == {"path": "org/tiny", "revision": COMMITS["main"]}
    (tmp_path / "again.yaml").write_text(text)
    online.asked.clear()
    _download.cache_clear()
    again = plan_recipe(read_recipe("again.yaml"))
    assert again.recipe == recipe
    assert online.asked == []  # that commit is in the cache


def test_a_revision_is_that_of_the_recipe(online):
    loaded = read_recipe("w4_rtn", ["model={path: org/tiny, revision: v1}"])
    recipe = plan_recipe(loaded).recipe
    assert recipe.model.revision == recipe.model.folder.name == COMMITS["v1"]


def test_a_folder_beside_the_recipe_wins_and_has_no_revision(online, tmp_path):
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    recipe = read_recipe("w4_rtn", ["model.path=org/tiny"]).recipe
    assert recipe.model.path == tmp_path / "org" / "tiny"
    with pytest.raises(RecipeError, match="is a local folder, which has none"):
        read_recipe("w4_rtn", ["model.path=org/tiny", "model.revision=v1"])


def test_a_model_that_is_nowhere_is_told_with_the_remedy(online, capsys, monkeypatch):
    loaded = read_recipe("w4_rtn", ["model.path=org/nowhere"])
    with pytest.raises(CheckpointError, match="hf download org/nowhere --local-dir nowhere"):
        plan_recipe(loaded)
    monkeypatch.setitem(sys.modules, "ptq.plan.plan", None)  # told before it would be imported
    for command in ("run", "check", "explain"):
        words = [command, "w4_rtn", "--set", "model.path=org/nowhere"]
        assert cli.main(words) == 2
        assert "hf download org/nowhere --local-dir nowhere" in capsys.readouterr().err


def test_engine_predict_and_convert_take_names(online, tmp_path, capsys):
    engine = Engine.from_pretrained("org/tiny", revision="v1")
    assert engine.checkpoint.path.name == COMMITS["v1"]
    words = ["org/tiny", "--revision", "v1", "--prompt", "def", "--max-tokens", "2", "--raw"]
    assert predict.main(words) == 0
    prompt = engine.generate(["def"], SamplingParams(max_tokens=2))[0]
    assert capsys.readouterr().out == f"{prompt.text}\n"
    assert cli.main(["convert", "org/tiny", "out", "--to", "gptq"]) == 2
    assert "no quantized weights" in capsys.readouterr().err


def test_the_hub_of_the_environment_is_asked(served, tmp_path):
    own = {"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ptq", "explain", "w4_rtn", "--set", "model.path=org/tiny"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "stored as int4" in done.stdout
    assert (tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMITS["main"]).is_dir()
