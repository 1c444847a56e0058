"""Help, wrong arguments and wrong recipes answer at once: nothing heavy is imported for them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ptq.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[3]
HEAVY = {
    "torch",
    "transformers",
    "datasets",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "numpy",
    "pandas",
    "pyarrow",
    "scipy",
    "tokenizers",
    "tqdm",
    "triton",
}
RUN_ALL = """
import contextlib, io, json, sys
from importlib import import_module
from formats.command import run_command
answers = []
for name, arguments in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = run_command(import_module(name).main, arguments)
        except SystemExit as end:
            code = end.code
    answers.append([code, said.getvalue(), sorted(sys.modules)])
print(json.dumps(answers))
"""
RECIPE = """\
model: {{path: {model}}}
scheme: {scheme}
methods: [rtn]
output: {{path: out}}
"""
BY_RECIPE = ("run", "check", "explain", "peers")


def answers(*calls: tuple[str, list[str]], folder: Path = ROOT) -> list[tuple[int, str]]:
    """Exit code and text of mains, one after the other in one fresh interpreter.

    The first that imports something heavy fails, by its name.
    """
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{RUN_ALL}"
    command = [sys.executable, "-c", code]
    options = {"capture_output": True, "text": True, "cwd": folder}
    done = subprocess.run(command, input=json.dumps(calls), **options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for call, (_, said, modules) in zip(calls, found, strict=True):
        assert not HEAVY & set(modules), f"{call} imports {HEAVY & set(modules)}: {said}"
    return [(code, said) for code, said, _ in found]


def test_the_python_door_opens_without_its_rooms():
    done = subprocess.run(
        [sys.executable, "-c", "import ptq, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert not HEAVY & set(done.stdout.split())


def test_every_command_helps_and_refuses_arguments_at_once():
    helps = [("ptq.cli", [name, "--help"]) for name in COMMANDS]
    modes = [("ptq.cli", ["bench", mode, "--help"]) for mode in ("--steps", "--kernels", "--tune")]
    wrong = [("ptq.cli", [name, "a", "--no-such-option"]) for name in COMMANDS]
    found = answers(*helps, *modes, *wrong)
    for call, (code, said) in zip([*helps, *modes], found, strict=False):
        assert code == 0, call
        assert said.startswith(f"usage: ptq {call[1][0]}"), call
    for call, (code, said) in zip(wrong, found[len(helps) + len(modes) :], strict=True):
        assert code == 2, call
        assert f"ptq {call[1][0]}: error: " in said, call


def test_wrong_recipes_are_refused_at_once(tmp_path):
    for name, family in (("model", "llama"), ("other", "t5")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": family}))
    (tmp_path / "typo.yaml").write_text(RECIPE.format(model="model", scheme="a8w8c9"))
    (tmp_path / "folder.yaml").write_text(RECIPE.format(model="modle", scheme="a8w8"))
    (tmp_path / "good.yaml").write_text(RECIPE.format(model="model", scheme="w8"))
    reasons = {
        ("none.yaml",): "none.yaml: cannot be read",
        ("typo.yaml",): "typo.yaml:2: scheme: unknown scheme 'a8w8c9'; did you mean 'a8w8c8'?",
        ("folder.yaml",): "folder.yaml:1: model.path: no such folder: ",
        ("good.yaml", "--set", "methods.0.rtn.scale=best"): "--set methods.0.rtn.scale=best",
        ("good.yaml", "--set", "observers.input.method=max"): "observers.input.method",
        ("good.yaml", "--set", "dataset.nme=x"): "did you mean 'name'?",
        ("good.yaml", "--set", "device=gpu"): "found the text 'gpu'",
        ("good.yaml", "--set", "model.path=other"): "is not supported yet. transformers knows it",
        ("good.yaml", "--set", "model.path=modle"): "directory; did you mean '",
        ("good.yaml", "--set", "model.path=good.yaml"): "good.yaml is a file; give the folder",
        (
            "good.yaml",
            "--output",
            "o",
            "--set",
            "output=1",
        ): "output=1: found 1; needed is a mapping of",
    }
    calls = [("ptq.cli", [name, *words]) for name in BY_RECIPE for words in reasons]
    for call, (code, said) in zip(calls, answers(*calls, folder=tmp_path), strict=True):
        assert code == 2, call
        assert reasons[tuple(call[1][1:])] in said, (call, said)


def test_folders_and_devices_that_are_none_are_refused_at_once(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    (tmp_path / "run" / "quantization.json").touch()
    (tmp_path / "stopped" / ".resume").mkdir(parents=True)
    (tmp_path / "stopped" / ".resume" / "progress.json").touch()
    (tmp_path / "r.yaml").write_text(RECIPE.format(model=".", scheme="w8"))
    no_run = "give the output folder of a finished `ptq run`"
    reasons = {
        "run r.yaml": "out exists already. Replace it with\n  ptq run r.yaml --force",
        "solve nope --output b": f"nope: no such folder; {no_run}",
        "solve out --output b": f"out: found no quantization.json; {no_run}",
        "report rnu": "rnu: no such folder; did you mean 'run'? give the output folder",
        "report run/checkpoint": "found no quantization.json; did you mean run? Give the output",
        "report stopped": "stopped: its run has not ended; the same `ptq run` goes on where it was stopped",
        "compare out nope": f"out: found no quantization.json; {no_run}",
        "diff r.yaml out": "out is a folder and r.yaml is not",
        "diff nope out": "nope: no such folder; give two checkpoints",
        "diff nope nope.yaml": "nope: cannot be read",
        "inspect otu": "otu: no such folder; did you mean 'out'? give the folder of a model",
        "inspect r.yaml": "r.yaml: found a file; give the folder of the model it belongs to",
        "predict otu --prompt x": "otu: no such folder; did you mean 'out'? give the folder",
        "predict out --prompt x --device gpu": "found 'gpu'; allowed are cpu, cuda and cuda:N",
        "predict out --input none.jsonl --output b": "none.jsonl: ",
        "bench otu": "otu: no such folder; did you mean 'out'? give the folder of a model",
        "bench --shape lama --scheme w4": "found 'lama'; did you mean 'llama-3-8b'?",
        "quantize otu --scheme w4": "error: otu: no such folder; did you mean 'out'? give the",
        "quantize out --scheme w5": "argument --scheme: no scheme 'w5'; did you mean 'w8'? allowed: w4,",
        "quantize out --scheme w4s8": "'w4s8'; give it to one whose methods fit: --recipe w4_two_sided --set scheme=w4s8",
        "quantize out --scheme w4_gptq": "no scheme 'w4_gptq': it is a recipe; give it as such, --recipe w4_gptq",
        "predict otu.gguf --prompt x": "otu.gguf: no such file; give the file of a model, or",
        "convert otu b --to float": "otu: no such folder; did you mean 'out'? give the folder",
        "run r.yaml --ouput x": "unrecognized arguments: --ouput x; there is no --ouput; did you mean --output?",
        "peers r.yaml --peer auto": "--peer auto: report.peers.0.name: unknown peer 'auto'",
        "predict out --promt x": "--input is required; there is no --promt; did you mean --prompt?",
        "--hlep": "no command '--hlep'; did you mean '--help'?",
    }
    calls = [("ptq.cli", line.split()) for line in reasons]
    for line, (code, said) in zip(reasons, answers(*calls, folder=tmp_path), strict=True):
        assert code == 2, line
        assert reasons[line] in said, (line, said)


@pytest.mark.parametrize("module", ["ptq.run", "inference.predict"])
def test_modules_as_commands_help_at_once(module):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not HEAVY & imported
