"""A user's first hour: a model that the project never saw, data of theirs, and nothing lost.

The model is sharded, in fp16, of another family than the default one, with a head of its own and a
chat template. What a command prints to be pasted next is pasted.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
import torch

from ptq.cli import main
from tests.conftest import write_model
from tests.e2e.installed import ROOT, environment, run
from tests.interrupts import take_interrupts

pytestmark = pytest.mark.usefixtures("unpictured")  # the first report has its pictures
RECIPE = """
base: a8w8c8
model: {path: own-model}
dataset:
  name: rows.jsonl
  calibration: {samples: 8, sequence_length: 64}
  evaluation: {samples: 4, sequence_length: 64}
output: {path: output/mine}
report:
  thresholds: {perplexity_ratio: 1.5, kl: 0.5}
  speed: {batch: 2, prompt_tokens: 8, new_tokens: 4}
"""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SMALL = [  # of a shipped recipe, for so small a model and so little text
    *("--set", "dataset.calibration.samples=8", "--set", "dataset.calibration.sequence_length=64"),
    *("--set", "dataset.evaluation.samples=4", "--set", "dataset.evaluation.sequence_length=64"),
    *("--set", "report.speed=false", "--set", "report.thresholds.kl=1"),
    *("--set", "report.thresholds.perplexity_ratio=2", "--set", "model.path=own-model"),
]


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def pasted(self) -> list[list[str]]:
        """The commands of ours that it printed on lines of their own."""
        lines = re.findall(r"^ +(ptq .*)$", self.out + self.err, re.MULTILINE)
        return [shlex.split(line)[1:] for line in lines]


class Desk:
    """A folder of a user's, and the commands that they give there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ptq(self, *words: str, typed: str = "") -> Answer:
        """Give a command, and what it reads from the keyboard."""
        out, err, keyboard = io.StringIO(), io.StringIO(), io.StringIO(typed)
        with (
            chdir(self.folder),
            redirect_stdout(out),
            redirect_stderr(err),
            mock.patch("sys.stdin", keyboard),
        ):
            try:
                code = main(words)
            except SystemExit as ended:  # of argparse
                code = int(ended.code or 0)
        return Answer(code, out.getvalue(), err.getvalue())

    def digests(self, name: str) -> dict[str, str]:
        """Every file below a folder, with its SHA-256."""
        top = self.folder / name
        files = sorted(path for path in top.rglob("*") if path.is_file())
        return {str(p.relative_to(top)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def write_own_model(folder: Path) -> None:
    """Qwen3 in fp16, in three shards, its head untied, with a chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_model(folder / "made", "qwen3", layers=3, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(folder / "made", dtype=torch.float16)
    model.save_pretrained(folder / "own-model", max_shard_size="400KB")
    tokenizer = AutoTokenizer.from_pretrained(folder / "made")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "own-model")
    assert len(list((folder / "own-model").glob("*.safetensors"))) == 3


def write_own_data(folder: Path) -> None:
    """The same texts as rows, as a table and as chats; and questions with answers."""
    library = Path(json.__file__).parents[1]
    texts = [path.read_text()[:4000] for path in sorted(library.glob("*.py"))[:30]]
    rows = [{"content": text} for text in texts]
    chats = [
        {"messages": [{"role": role, "content": text[:900]} for role in ("user", "assistant")]}
        for text in texts
    ]
    questions = [{"src": text[:60], "tgt": text[60:70]} for text in texts[:3]]
    for name, lines in (("rows", rows), ("chats", chats), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pd.DataFrame({"text": texts}).to_parquet(folder / "table.parquet")


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Desk:
    """A folder with a model and data of one's own."""
    folder = tmp_path_factory.mktemp("desk")
    write_own_model(folder)
    write_own_data(folder)
    return Desk(folder)


@pytest.fixture(scope="module")
def first(desk) -> Answer:
    """The first run: the rows have another column than expected, which the message tells."""
    recipe = desk.folder / "mine.yaml"
    recipe.write_text(RECIPE)
    refused = desk.ptq("check", "mine.yaml", "--no-time")
    (setting,) = re.findall(r"Set (dataset\.column): content$", refused.err, re.MULTILINE)
    assert (refused.code, setting) == (2, "dataset.column")
    recipe.write_text(RECIPE.replace("rows.jsonl", "rows.jsonl\n  column: content"))
    assert desk.ptq("check", "mine.yaml", "--no-time").code == 0
    return desk.ptq("run", "mine.yaml")


def test_own_recipe_makes_a_checkpoint_and_a_report(desk, first):
    assert first.code == 0, first.err
    assert "mean KL (nats)" in first.out
    report = desk.folder / "output/mine/report/report.html"
    assert "own-model" in report.read_text()


def test_what_a_run_prints_next_can_be_pasted(desk, first):
    names = [words[0] for words in first.pasted]
    assert names == ["predict", "inspect", "bench", "chat", "serve"]
    for place in (0, 1, 3):
        answer = desk.ptq(*first.pasted[place], typed="Hello\n")
        assert answer.code == 0, answer.err
        assert answer.out.strip()
    assert {words[1] for words in first.pasted[1:]} == {"output/mine/checkpoint"}
    assert Path(desk.folder / "output/mine/checkpoint").is_dir()


def test_a_second_run_into_one_folder_is_refused_and_costs_nothing(desk, first):
    before = desk.digests("output/mine")
    answer = desk.ptq("run", "mine.yaml")
    assert answer.code == 2
    assert "exists already" in answer.err
    assert answer.pasted == [["run", "mine.yaml", "--force"]]
    assert desk.digests("output/mine") == before


def test_a_table_and_a_shipped_recipe_by_its_name(desk):
    answer = desk.ptq(
        *("run", "w4_rtn", *SMALL, "--set", "dataset.name=table.parquet", "--output", "output/w4")
    )
    assert answer.code == 0, answer.err
    assert (desk.folder / "output/w4/checkpoint/quant/manifest.json").exists()


def test_chats_are_read_as_the_message_says(desk):
    words = ["run", "c8", *SMALL, "--set", "dataset.name=chats.jsonl", "--output", "output/c8"]
    refused = desk.ptq(*words)
    (setting,) = re.findall(r"set (dataset\.messages_column): (\w+)", refused.err)
    answer = desk.ptq(*words, "--set", f"{setting[0]}={setting[1]}")
    assert answer.code == 0, answer.err


def test_a_file_of_questions_is_answered_and_scored(desk, first):
    words = ["--input", "questions.jsonl", "--output", "answers.jsonl", "--max-tokens", "4"]
    answer = desk.ptq("predict", "output/mine/checkpoint", *words)
    assert answer.code == 0, answer.err
    rows = [json.loads(x) for x in (desk.folder / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert all(row["logprob"] < 0 and not row["exact_match"] for row in rows)
    assert "exact match 0.0% of 3" in answer.out + answer.err


def test_the_model_can_be_talked_with(desk, first):
    """Each line is a message; an answer that is cut says so."""
    words = ["chat", "output/mine/checkpoint", "--max-tokens", "2"]
    answer = desk.ptq(*words, typed="hello\n/reset\nimport os\n")
    assert answer.code == 0, answer.err
    assert (answer.out + answer.err).count("--max-tokens 2") == 2


def test_one_line_without_a_recipe(desk):
    """It finds the chats of a file by itself, and writes the recipe that repeats it."""
    words = ["quantize", "own-model", "--scheme", "w8", "--data", "chats.jsonl", *SMALL[:-2]]
    answer = desk.ptq(*words, "--output", "output/quick")
    assert answer.code == 0, answer.err
    again = desk.ptq("run", "output/quick/recipe.yaml", "--output", "output/repeated")
    assert again.code == 0, again.err
    made, repeated = (desk.digests(f"output/{name}/checkpoint") for name in ("quick", "repeated"))
    assert made["model.safetensors"] == repeated["model.safetensors"]


def test_another_checkpoint_of_what_was_seen(desk, first):
    """Solved without the model, then measured as the command says, and held against the first."""
    solved = desk.ptq(
        *("solve", "output/mine", "--set", "methods.0.smoothquant.alpha=0.9"),
        *("--set", "methods.1.smooth_k.alpha=0.5"),
        *("--output", "output/solved"),
    )
    assert solved.code == 0, solved.err
    assert solved.pasted[0] == ["report", "output/solved"]
    assert desk.ptq(*solved.pasted[0]).code == 0
    compared = desk.ptq("compare", "output/mine", "output/solved")
    assert compared.code == 0, compared.err
    assert "`solved`" in compared.out


def test_ctrl_c_loses_nothing(desk, first):
    """Stopped after its first block, the same command goes on, and ends with the same bytes."""
    words = ["run", "mine.yaml", "--output", "output/stopped"]
    folder = desk.folder / "output/stopped"
    process = subprocess.Popen(
        [sys.executable, "-m", "ptq", *words],
        cwd=desk.folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        preexec_fn=take_interrupts,
    )
    progress = folder / ".resume/progress.json"
    while process.poll() is None:
        if progress.exists() and json.loads(progress.read_bytes())["blocks"]:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130, told
    assert re.search(r"[12] of 3 blocks are kept: the same command goes on from there", told), told
    assert not (folder / "checkpoint").exists()
    again = desk.ptq(*words)
    assert again.code == 0, again.err
    assert "going on at block" in again.out + again.err
    whole, resumed = desk.digests("output/mine/checkpoint"), desk.digests(f"{folder}/checkpoint")
    assert resumed["model.safetensors"] == whole["model.safetensors"]
    assert resumed["quant/kv_scales.safetensors"] == whole["quant/kv_scales.safetensors"]


def test_the_python_door_opens_in_a_fresh_interpreter(desk, first):
    """What ptq/README.md shows, with a recipe of one's own."""
    (code,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "ptq/README.md").read_text(), re.M | re.S
    )
    code = code.replace('"a8w8c8"', '"mine.yaml"').replace("max_tokens=32", "max_tokens=4")
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"{code}\nprint('\\nscales', len(scales))"]
    done = subprocess.run(command, cwd=desk.folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 20
    made, whole = (
        desk.digests("output/from_python/checkpoint"),
        desk.digests("output/mine/checkpoint"),
    )
    assert made["model.safetensors"] == whole["model.safetensors"]


@pytest.mark.ci
def test_the_wheel_works_outside_the_checkout(desk, wheel, tmp_path):
    """Installed, on the user's model, without a recipe's file at hand."""
    python, _ = environment(tmp_path / "env", "wheel", wheel)
    ptq = str(python.parent / "ptq")
    assert "a8w8c8" in run([ptq, "recipes"], desk.folder).stdout
    words = ["run", "a8w8c8", *SMALL, "--set", "dataset.name=table.parquet", "--output"]
    run([ptq, *words, "output/wheel"], desk.folder)
    words = ["predict", "output/wheel/checkpoint", "--prompt", "import", "--max-tokens", "2"]
    assert run([ptq, *words], desk.folder).stdout
