"""Faults planted in a real chat model, each of which ends red by the figure that tells.

`PTQ_REAL_MODEL` names the folder of one such as SmolLM2-135M-Instruct: in the transformers layout,
one safetensors file, head and embedding shared; `PTQ_REAL_RUN` the output of its a8w8c8 run.
Without them there is nothing to test.
`PTQ_REAL_SEEDS` says on how many seeds the model is compared with itself.
"""

import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from formats.command import bar
from inference.engine import Engine
from inference.requests.request import SamplingParams
from ptq.certify import answering
from ptq.certify.figures import Figure, judge, overall
from ptq.certify.measuring import PARTS, certify, open_pair, open_setting
from ptq.certify.setting import Pair
from tests.ptq.certify import planting

FOLDER = Path(os.environ.get("PTQ_REAL_MODEL", "/no/model"))
RUN = Path(os.environ.get("PTQ_REAL_RUN", "/no/run"))
SEEDS = int(os.environ.get("PTQ_REAL_SEEDS", "0"))
pytestmark = [
    pytest.mark.ci,  # some minutes each
    pytest.mark.skipif(not FOLDER.is_dir(), reason="PTQ_REAL_MODEL names no model"),
]
CHAT = "".join(
    f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\nIt is a thing of use.<|im_end|>\n"
    for asked in ("What is a boat?", "Name a colour.", "Who are you?", "What is the sea?") * 9
)
FAULTS: dict[str, tuple[Callable[[Path, Path], Path], set[str]]] = {
    "end": (partial(planting.late_end, token=2, by=2.0, text=CHAT), {"answers.end"}),
    "head": (partial(planting.silent_head, layer=0, head=0), {"kl.chat"}),
    "bits": (partial(planting.coarse_layer, layer=15), {"kl.mean", "kl.chat"}),
}


def red(figures: tuple[Figure, ...]) -> set[str]:
    return {figure.name for figure in figures if figure.verdict == "red"}


def judged(folder: Path) -> tuple[str, set[str]]:
    """The verdict of a copy, and which figures are red."""
    found = certify(folder, FOLDER, progress=False)
    return found.verdict, red(found.figures)


def test_a_model_against_itself_is_green(tmp_path):
    assert judged(shutil.copytree(FOLDER, tmp_path / "model")) == ("green", set())


@pytest.mark.skipif(not SEEDS, reason="PTQ_REAL_SEEDS is not set")
def test_a_model_against_itself_is_hardly_ever_red(monkeypatch):
    """All answers and JSON are sampled, by seeds of their own in each of two engines, the second
    of which runs other batches; what is compared token by token does not depend on seeds."""
    greedy, lights = answering.answers, dict[int, str]()

    def sampled(engine: Engine, prompts: list[list[int]], params: list[Any], bar: Any) -> Any:
        draw = random.Random(f"{seed} {engine is pair.original}")
        new = [p.max_tokens for p in params]
        params = [
            SamplingParams(max_tokens=most, temperature=0.8, seed=draw.randrange(2**31))
            for most in new
        ]
        return greedy(engine, prompts, params, bar)

    monkeypatch.setattr(answering, "answers", sampled)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for seed in range(SEEDS):
        setting = open_setting((FOLDER, FOLDER), "quick", seed, None, device)
        if not seed:
            first, other = (open_pair((FOLDER, FOLDER), setting, device, n) for n in (16, 5))
            pair = Pair(first.original, other.quantized)
        parts = [PARTS[name] for name in ("answers", "objects")]
        quiet = bar(title="", unit="step", shown=False)
        rows = [part.measure(pair, part.cases(setting), quiet) for part in parts]
        figures = judge(row for part in rows for case in part for row in case)
        lights[seed], said = overall(figures)
        print(seed, said, flush=True)
    assert sum(light == "red" for light in lights.values()) < 0.05 * SEEDS


@pytest.mark.skipif(not RUN.is_dir(), reason="PTQ_REAL_RUN names no run")
@pytest.mark.parametrize(
    ("plant", "telling"),
    [
        (planting.wrong_cache_scales, "kl.mean"),
        (partial(planting.coarse_tokens, tokens=[0, 1, 2]), "kl.turns"),  # those of its template
    ],
)
def test_a_fault_loses_more_than_the_scheme_is_known_to(tmp_path, plant, telling):
    plant(RUN / "checkpoint", tmp_path / "checkpoint")
    shutil.copytree(RUN / "report", tmp_path / "report")
    assert telling in judged(tmp_path / "checkpoint")[1]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_red_by_the_figure_that_tells(name, tmp_path):
    plant, telling = FAULTS[name]
    light, names = judged(plant(FOLDER, tmp_path / "model"))
    assert light == "red"
    assert telling <= names
