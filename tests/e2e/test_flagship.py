"""The main recipe at full size, as a user runs it from the shell: what README promises of it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch

from ptq.cli import main

# Its sizes take minutes; `test_first_hour.py` and `test_recipes.py` run the same on little data.
pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
UNTIMED = ["--set", "report.speed=false"]


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m ...` as a user does, from a folder of the user's."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def run_recipe(name: str, folder: Path, *more: str) -> tuple[int, str, dict]:
    """Run a recipe into `folder/output/<name>`: exit code, standard output, report data."""
    done = command("ptq.run", str(ROOT / "recipes" / f"{name}.yaml"), *more, cwd=folder)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads((folder / "output" / name / "report" / "report.json").read_text())
    return done.returncode, done.stdout, report


@pytest.fixture(scope="module")
def flagship(tmp_path_factory) -> tuple[Path, int, str, dict]:
    """The first command of the README, at full size."""
    folder = tmp_path_factory.mktemp("flagship")
    return folder, *run_recipe("a8w8c8", folder)


def test_a8w8c8_keeps_the_accuracy_that_it_promises(flagship) -> None:
    _, code, output, report = flagship
    accuracy = report["accuracy"]
    assert code == 0, output
    assert accuracy["perplexity_ratio"] <= 1.01
    assert accuracy["kl_mean"] <= 0.01
    assert accuracy["tokens"] > 30_000


def test_the_same_recipe_without_smoothing_is_visibly_worse(flagship, tmp_path) -> None:
    smooth = flagship[3]["accuracy"]
    rough = run_recipe("a8w8c8_unsmoothed", tmp_path, *UNTIMED)[2]["accuracy"]
    assert rough["tokens"] == smooth["tokens"]
    assert rough["perplexity_ratio"] - 1 > 3 * (smooth["perplexity_ratio"] - 1)
    assert rough["kl_mean"] > 3 * smooth["kl_mean"]


def test_the_printed_next_commands_work_when_pasted(flagship, capsys) -> None:
    folder, _, output, _ = flagship
    lines = [line.strip() for line in output.splitlines()]
    commands = [line for line in lines if line.startswith("ptq ")]
    serving = [line for line in commands if line.startswith("ptq serve ")]
    assert {line.split()[1] for line in commands} >= {"predict", "inspect", "bench", "serve"}
    for line in set(commands) - set(serving):
        with contextlib.chdir(folder):
            code = main(shlex.split(line)[1:])
        out, err = capsys.readouterr()
        assert code == 0, line + out + err
        assert out.strip(), line


def test_the_printed_server_answers_the_line_that_it_prints(flagship) -> None:
    folder, _, output, _ = flagship
    (line,) = (line.strip() for line in output.splitlines() if line.startswith("  ptq serve "))
    words = [sys.executable, "-m", *shlex.split(line), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        curl = next(line for line in server.stdout if line.startswith("    curl "))
        _, url, flag, header, data_flag, data = shlex.split(curl)
        assert (flag, data_flag) == ("-H", "-d")
        name, _, value = header.partition(": ")
        answer = httpx.post(url, headers={name: value}, content=data, timeout=60).json()
        assert answer["choices"][0]["text"].startswith("\n    return a + b")
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0


def mean_kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean KL divergence of two sets of logits, in nats."""
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def test_transformers_gives_the_same_logits_within_the_noise_of_rounding(
    flagship, monkeypatch
) -> None:
    """The noise is measured: our own engine with input scales changed by a millionth.

    A change that small moves a few activations over a rounding edge; each is a whole step of int8,
    which moves more in the next block. Two right implementations differ by as much. A scale of a
    token is the largest magnitude over 127 here and over 127.5 in compressed-tensors, which is no
    difference of rounding: the test compares with theirs over 127.
    """
    from compressed_tensors.quantization.utils import helpers
    from transformers import AutoModelForCausalLM

    from calibrate.data import load_tokens
    from calibrate.spec import DatasetSpec
    from inference.engine import Engine

    folder = flagship[0] / "output" / "a8w8c8" / "checkpoint"
    engine, nudged = (Engine.from_pretrained(folder, quantized_kv=False) for _ in range(2))
    for layer in nudged.model.layers:
        for linear in (layer.qkv, layer.feed_forward.gate_up):
            if linear.input_scale is not None:
                linear.input_scale.mul_(1 + 1e-6)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    their_scales = helpers.calculate_qparams

    def over_127(*arguments, **options):
        scale, zero = their_scales(*arguments, **options)
        return scale * (127.5 / 127), zero

    monkeypatch.setattr(helpers, "calculate_qparams", over_127)
    sequences = load_tokens(DatasetSpec(), engine.tokenizer, "evaluation").sequences()[:4]
    noise, difference, agreement = [], [], []
    for ids in sequences:
        ours = engine.score(ids)
        with torch.no_grad():
            logits = theirs(ids[None]).logits[0]
        noise.append(mean_kl(ours, nudged.score(ids)))
        difference.append(mean_kl(logits, ours))
        agreement.append((logits.argmax(-1) == ours.argmax(-1)).double().mean().item())
    print(f"KL to transformers {sum(difference) / 4:.5f}, to ourselves nudged {sum(noise) / 4:.5f}")
    assert sum(difference) < 1.5 * sum(noise)
    assert sum(agreement) / 4 > 0.95
