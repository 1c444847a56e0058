"""`ptq serve --engine vllm`: the check, the command, and its start with a stand-in for vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from formats.cache_scheme import KVCacheSpec
from formats.errors import RequestError
from formats.scheme import PRESETS
from inference.server import command
from inference.server.vllm import Shards, _solving, check_vllm, shards_of
from ptq.recipe.reading import read_recipe

ROOT = Path(__file__).parents[4]
STAND_IN = """#!{python}
import json, os, sys
if "-c" in sys.argv:  # asked whether it has vLLM
    sys.exit({missing})
seen = {{k: os.environ.get(k) for k in ("VLLM_API_KEY", "PYTHONPATH", "PYTHONSAFEPATH")}}
print(json.dumps([sys.argv[1:], seen]))
sys.exit(7)
"""


@pytest.fixture
def stand_in(tmp_path):
    """Makes a program in the place of the interpreter that has vLLM."""

    def make(missing: int = 0) -> Path:
        path = tmp_path / "python"
        path.write_text(STAND_IN.format(python=sys.executable, missing=missing))
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def a8w8c8(make_quantized, tiny_llama, tmp_path):
    """A checkpoint with a static cache, in the output of a run."""
    folder = tmp_path / "run/checkpoint"
    folder.parent.mkdir()
    folder.symlink_to(make_quantized(tiny_llama, "a8w8c8"))
    return folder


def changed(folder: Path, to: Path, change) -> Path:
    """A folder with another config.json."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_it_becomes_vllms_server_on_the_checkpoint(a8w8c8, stand_in):
    python = stand_in()
    theirs = ["--port", "8123", "--tensor-parallel-size", "2", "--enforce-eager"]
    words = [str(a8w8c8), "--engine", f"vllm={python}", "--", *theirs]
    done = subprocess.run(
        [sys.executable, "-m", "ptq", "serve", *words],
        env=os.environ | {"PTQ_API_KEY": "secret", "PYTHONPATH": f"{ROOT}{os.pathsep}/elsewhere"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr  # vLLM's own
    *notes, last = done.stdout.splitlines()
    arguments, environment = json.loads(last)
    assert arguments[:3] == ["-m", "vllm.entrypoints.cli.main", "serve"]
    assert arguments[3:] == [str(a8w8c8), *theirs, "--served-model-name", str(a8w8c8)]
    assert environment == {
        "VLLM_API_KEY": "secret",
        "PYTHONPATH": "/elsewhere",
        "PYTHONSAFEPATH": "1",
    }
    assert "secret" not in " ".join([*notes, *arguments])
    assert notes[0].startswith("  - cache: vLLM does not serve")
    assert notes[-1].startswith(f"starting {python} -m vllm")


def test_a_name_of_the_users_own_and_the_number_of_gpus_are_read(a8w8c8, stand_in):
    assert shards_of(["--port", "1", "-tp", "4", "-pp", "2", "--dtype=auto"]) == Shards(4, 2)
    assert shards_of(["--tensor-parallel-size=3"]) == Shards(3)
    with pytest.raises(RequestError, match="options of vLLM: .*--tensor-parallel-size.*'x'"):
        shards_of(["--tensor-parallel-size", "x"])
    for theirs in (["--served-model-name", "a"], ["--served-model-name=a"]):
        words = [str(a8w8c8), "--engine", f"vllm={stand_in()}", "--", *theirs]
        done = subprocess.run(
            [sys.executable, "-m", "ptq", "serve", *words], capture_output=True, text=True, cwd=ROOT
        )
        arguments, _ = json.loads(done.stdout.splitlines()[-1])
        assert arguments[4:] == theirs


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--engine", "vllm", "--speculate", "ngram"], "does not take --speculate: .* follow `--`"),
        (["--engine", "vllm", "--port", "9", "--device", "cuda:1"], "take --device, --port: "),
        (["--engine", "vllm", "--", "-tp", "3"], "which --tensor-parallel-size 3 does not divide"),
        (["--engine", "vllm=/no/where"], "--engine vllm=/no/where: it does not run"),
        (["--", "--enforce-eager"], "-- --enforce-eager: of vLLM"),
    ],
)
def test_what_one_of_the_engines_does_not_have_is_refused(tiny_llama, words, told):
    with pytest.raises(RequestError, match=told):
        command.main([str(tiny_llama), *words])


def test_an_interpreter_without_vllm_is_told_with_how_to_install_it(tiny_llama, stand_in):
    with pytest.raises(
        RequestError, match="has no vLLM. .* install vllm`, and give --engine vllm="
    ):
        command.main([str(tiny_llama), "--engine", f"vllm={stand_in(missing=1)}"])


def test_a_float_model_and_one_without_our_cache_need_no_word(
    tiny_llama, make_quantized, make_model
):
    assert check_vllm(tiny_llama, Shards(2)) == []
    assert check_vllm(make_quantized(tiny_llama, "a8w8"), Shards()) == []
    (told,) = check_vllm(make_model("olmo2"), Shards())
    assert told == (
        "model: vLLM runs 'olmo2' by transformers' code, slower than models of its own."
    )


@pytest.mark.parametrize("scheme", ["a8w8", "a8w8_dynamic"])
def test_scales_of_sink_tokens_that_it_does_not_read_are_told(
    tiny_llama, make_quantized, tmp_path, scheme
):
    def keep(config: dict) -> None:
        config["ptq"]["sink_tokens"] = 1

    found = check_vllm(
        changed(make_quantized(tiny_llama, scheme), tmp_path / "own", keep), Shards()
    )
    assert ["sinks.keep=none" in note for note in found] == [True] * (scheme == "a8w8")


def test_a_cache_whose_keys_are_not_stored_as_they_are_is_measured_as_vllm_stores_keys():
    lines = _solving(Path("out"), [PRESETS["c4"].kv_cache, PRESETS["k8v4"].kv_cache]).split("\n")
    for line, dtype in zip(lines, ("int8", "fp8_e4m3"), strict=True):
        given = re.findall(r"--set (\S+)", line)
        cache = read_recipe("c4", given).recipe.scheme.kv_cache
        assert cache == KVCacheSpec(dtype=dtype, granularity="per_token_head")


def test_what_the_cache_costs_is_told_by_the_runs_report(a8w8c8):
    cache, accuracy, memory = check_vllm(a8w8c8, Shards())
    assert "(static c8), but one of 16 bits: a token takes 2 times the memory" in cache
    run = a8w8c8.parent
    # the link leads elsewhere: the report is looked for beside the folder that it leads to
    beside = a8w8c8.resolve().parent
    assert f"`ptq report {beside}` measures it" in accuracy
    assert f"ptq solve {beside} --set scheme.kv_cache.dtype=int8" in memory
    real = changed(a8w8c8, run / "real", lambda config: None)
    (run / "report").mkdir()
    measured = {"whole": 0.00949, "float_cache": 0.00872, "sequences": 4}
    (run / "report/report.json").write_text(json.dumps({"attribution": measured}))
    assert check_vllm(real, Shards())[1] == (
        "accuracy: the KL divergence to the original is 0.0087 nats with a float cache, and "
        "0.0095 with the checkpoint's own (4 sequences of its evaluation)."
    )
    (run / "report/report.json").write_text(json.dumps({"attribution": {"whole": 0.1}}))
    assert "measures it" in check_vllm(real, Shards())[1]  # a report of before


def test_what_cannot_be_served_is_refused_by_name(a8w8c8, make_quantized, tiny_llama, tmp_path):
    def tie(config) -> None:
        groups = config["quantization_config"]["config_groups"]
        groups["group_0"]["weights"]["strategy"] = "tied_channel"

    with pytest.raises(RequestError, match="one quantized tensor, which only this engine knows"):
        check_vllm(changed(a8w8c8, tmp_path / "tied", tie), Shards())
    with pytest.raises(RequestError) as error:
        check_vllm(make_quantized(tiny_llama, "w4"), Shards(tensor=3, pipeline=5))
    told = str(error.value)
    assert "it has 4 attention heads, which --tensor-parallel-size 3 does not divide" in told
    assert "it has 2 layers, too few for --pipeline-parallel-size 5" in told
    with pytest.raises(RequestError, match="o_proj has 128 inputs with a scale for every"):
        check_vllm(make_quantized(tiny_llama, "w4"), Shards(tensor=4))
