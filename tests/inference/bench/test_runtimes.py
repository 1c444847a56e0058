"""Other runtimes in `ptq bench`: a stand-in through the real worker, and all the ways to fail."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from formats.command import run_command
from formats.errors import EngineError, RequestError
from formats.scheme import PRESETS, LayerScheme
from inference.bench import command as bench
from inference.bench.figures import compare_turns
from inference.bench.load import Load, Run
from inference.bench.peers.runtimes import (
    RUNTIMES,
    MeasuredModel,
    Runtime,
    RuntimeChoice,
    read_choices,
    started,
)
from inference.bench.shapes import SHAPES

LOAD = Load(batch=2, prompt_tokens=5, new_tokens=3)
STAND_IN = """\
import json, os, sys

def prepare(job):
    with open(job.path("prepared"), "a") as file:
        file.write("once ")

class load:
    note, weight_bytes, kv_bytes_per_token = "stand-in", 7, 5

    def __init__(self, job):
        self.job = job
        print("no answer")
        os.write(1, b"no answer either\\n")

    def run(self, prompts, new_tokens):
        told = {
            "prompts": prompts,
            "ours": sorted({"ptq", "calibrate", "formats", "inference"} & set(sys.modules)),
            "python": [name for name in os.environ if name.startswith("PYTHON")],
            "omp": os.environ["OMP_NUM_THREADS"],
            "job": [self.job.format, self.job.cache, self.job.threads],
        }
        self.job.path("told").write_text(json.dumps(told))
        return [10.0, 12.0, *(12.0 + 0.25 * (i + 1) for i in range(new_tokens - 1))]
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Puts a stand-in into the catalogue: an adapter's text, which runs under this interpreter."""

    def make(text: str = STAND_IN, needs: tuple[str, ...] = ("torch",)) -> RuntimeChoice:
        path = tmp_path / "adapter.py"
        path.write_text(text)
        by_bits = {4: "q4", 8: "q8", 16: "plain"}
        package, *others = needs
        formats = ("q4", "q8", "plain")
        runtime = Runtime(package, tuple(others), path, formats, by_bits, ("narrow",))
        monkeypatch.setitem(RUNTIMES, "fake", runtime)
        return RuntimeChoice("fake", sys.executable, "q4", None)

    return make


def process(spec: RuntimeChoice, work: Path, config=None) -> AbstractContextManager[MeasuredModel]:
    return started(spec, config or {"vocab_size": 50}, "tiny", work)


def test_a_run_is_what_the_adapter_timed(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with process(fake(), tmp_path / "w") as peer:
        runs = [peer.run(LOAD), peer.run(LOAD)]
    assert peer.note == f"fake q4: torch {version('torch')}, stand-in"
    run = runs[0]
    assert (run.prefill_s, run.decode_s, run.decode_tokens) == (2.0, 0.5, 4)
    assert (run.first_token_s, run.per_token_s) == ([2.0, 2.0], [0.25] * 4)
    assert (run.kv_bytes_per_token, run.weight_bytes) == (5, 7)
    assert 5e6 < run.peak_memory_bytes < 1e9
    (prepared,) = (tmp_path / "w").glob("tiny-*-prepared")
    assert prepared.read_text() == "once "
    told = json.loads(next((tmp_path / "w").glob("tiny-*-told")).read_text())
    prompts = told.pop("prompts")
    assert [len(prompt) for prompt in prompts] == [5, 5]
    assert prompts[0] != prompts[1]
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    threads = torch.get_num_threads()
    job = ["q4", None, threads]
    assert told == {"ours": [], "python": [], "omp": str(threads), "job": job}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("def prepare(job):", "def prepare(job):\n    raise OSError('no\\nroom')", r"fake q4: OSError: no room. All that it printed is in .*fake.log"),
        ("import json, os, sys", "import json, os, sys, nothing_of_that_name", "ModuleNotFoundError: No module named"),
        ("self.job = job", "sys.stderr.write('last words\\n'); os._exit(3)", "ended with exit code 3; the last that it printed: last words"),
        ("told = {", "os.kill(os.getpid(), 9)\n        told = {", r"exit code -9 \(killed: memory may have run out\)"),
        ("return [10.0, ", "return [", "ValueError: 3 tokens were asked for, 2 came"),
    ],
)  # fmt: skip
def test_a_peer_that_fails_says_why(fake, tmp_path, monkeypatch, old, new, reason):
    assert old in STAND_IN
    spec = fake(STAND_IN.replace(old, new))
    processes, popen = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: processes.append(popen(*a, **k)) or processes[-1]
    )
    with pytest.raises(EngineError, match=reason), process(spec, tmp_path / "w") as peer:
        peer.run(LOAD)
    assert processes
    assert all(p.returncode is not None for p in processes)  # they have ended, and were waited for


def test_a_missing_package_says_what_to_install(fake):
    spec = fake(needs=("torch", "no-such-package"))
    message = f"fake needs no-such-package, which {sys.executable} does not have; install with"
    with pytest.raises(EngineError, match=message) as caught:
        spec.check_installed()
    assert f"`{sys.executable} -m pip install no-such-package`" in str(caught.value)
    with pytest.raises(EngineError, match="/bin/true cannot be used as a Python interpreter"):
        RuntimeChoice("fake", "/bin/true", "q4", None).check_installed()


def test_formats_follow_from_our_weights_unless_they_are_given():
    texts = ["llama.cpp=/env/bin/python", "openvino", "transformers"]
    for preset, formats in (
        ("a8w4", ["Q4_0", "int4", "bfloat16"]),
        ("fp8_channel", ["Q8_0", "int8", "bfloat16"]),
        ("c8", ["F16", "fp16", "bfloat16"]),
    ):
        assert [spec.format for spec in read_choices(texts, [], [], PRESETS[preset])] == formats
    specs = read_choices(texts, ["Q4_K_M", "float32"], ["q8_0"], LayerScheme())
    assert [spec.format for spec in specs] == ["Q4_K_M", "fp16", "float32"]
    assert [spec.cache for spec in specs] == ["q8_0", None, None]
    assert [spec.python for spec in specs] == ["/env/bin/python", sys.executable, sys.executable]
    assert specs[0].text == "llama.cpp Q4_K_M cache q8_0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["lama.cpp"], [], []), "peer: found 'lama.cpp'; allowed are llama.cpp, openvino"),
        ((["llama.cpp"], ["int4"], []), "peer_format: found 'int4'; .* allow Q4_0, Q4_K_M, Q8_0"),
        ((["transformers"], [], ["u8"]), "peer_kv: found 'u8'; .* allow none"),
        (([], ["Q4_0"], []), "peer_format: found 'Q4_0'; .* allow none"),
    ],
)
def test_unknown_peers_formats_and_caches_are_refused(arguments, message):
    with pytest.raises(RequestError, match=message):
        read_choices(*arguments, LayerScheme())


def test_ratios_are_those_of_the_turns():
    def a_run(prefill: float, decode: float) -> Run:
        return Run(prefill, decode, 4, [prefill], [decode], 1, 1, 1)

    ours = [a_run(1.0, 2.0), a_run(2.0, 2.0), a_run(4.0, 1.0)]
    theirs = [a_run(2.0, 1.0), a_run(8.0, 1.0), a_run(4.0, 4.0)]
    ratio = compare_turns(LOAD, ("ours", ours), ("theirs", theirs))
    assert (ratio.batch, ratio.model, ratio.reference) == (2, "ours", "theirs")
    assert ratio.prefill.model_dump() == {"median": 2.0, "low": 1.0, "high": 4.0}
    assert ratio.decode.model_dump() == {"median": 0.5, "low": 0.5, "high": 4.0}


def test_the_command_measures_a_shape_beside_a_peer(fake, tmp_path, capsys):
    fake()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 64, "head_dim": 32}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape, work, file = tmp_path / "small", tmp_path / "work", tmp_path / "speed.json"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(SHAPES["llama-1.1b"] | sizes))
    arguments = ["--shape", str(shape), "--scheme", "a8w8", "--quantize-head", "--work", str(work)]
    arguments += ["--peer", f"fake={sys.executable}", "--peer-kv", "narrow", "--json", str(file)]
    arguments += ["--batch", "2", "--prompt", "5", "--new", "3", "--repeats", "2"]
    assert bench.main(arguments) == 0
    (made,) = work.glob("small-a8w8-head8-*")
    out, data = capsys.readouterr().out, json.loads(file.read_text())
    assert [row["model"] for row in data["results"]] == ["fake q8 cache narrow", made.name]
    (ratio,) = data["ratios"]
    assert (ratio["reference"], ratio["model"]) == ("fake q8 cache narrow", made.name)
    peer, ours = data["results"]
    assert peer["prefill_tokens_s"]["median"] == 5.0
    low, high = (ours["prefill_tokens_s"][end] / 5.0 for end in ("low", "high"))
    assert ratio["prefill"]["low"] == pytest.approx(low)
    assert ratio["prefill"]["high"] == pytest.approx(high)
    assert f"batch 2: {made.name} runs prefill at {ratio['prefill']['median']:.2f}x [" in out
    assert data["notes"][0].endswith(f"torch {version('torch')}, stand-in")
    assert "head int8 weights per_channel, dynamic int8 inputs per_token" in data["notes"][1]


def test_a_command_that_cannot_be_meant_is_refused(tiny_llama, fake, capsys):
    for arguments in (
        [],
        [str(tiny_llama), "--shape", "llama-1.1b", "--scheme", "a8w8"],
        ["--shape", "llama-1.1b"],
        [str(tiny_llama), "--quantize-head"],
    ):
        with pytest.raises(SystemExit) as caught:
            bench.main(arguments)
        assert caught.value.code == 2
    capsys.readouterr()
    assert run_command(bench.main, [str(tiny_llama), "--peer", "lama"]) == 2
    assert "peer: found 'lama'; allowed are" in capsys.readouterr().err
    fake(needs=("no-such-package",))
    assert run_command(bench.main, [str(tiny_llama), "--peer", "fake"]) == 2
    assert "fake needs no-such-package" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(RUNTIMES))
def test_the_real_package(name, tmp_path):
    """Runs where the package is installed beside ours."""
    spec = RuntimeChoice(name, sys.executable, RUNTIMES[name].by_bits[8], None)
    try:
        spec.check_installed()
    except EngineError:
        pytest.skip(f"{name} is not installed")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 64, "head_dim": 64}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = SHAPES["llama-1.1b"] | sizes
    with process(spec, tmp_path, config) as peer:
        runs = [peer.run(LOAD), peer.run(Load(batch=1, prompt_tokens=3, new_tokens=2))]
    assert [run.decode_tokens for run in runs] == [4, 1]
    assert all(run.prefill_s > 0 and run.decode_s > 0 for run in runs)
    assert runs[0].kv_bytes_per_token % (2 * 2 * 64) == 0
