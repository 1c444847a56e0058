"""Faults planted in a real chat model, each of which ends red by the figure that tells.

`PTQ_REAL_MODEL` names the folder of one such as SmolLM2-135M-Instruct: in the transformers layout,
one safetensors file, head and embedding shared; `PTQ_REAL_RUN` the output of its a8w8c8 run.
Without them there is nothing to test.
"""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ptq.certify.figures import Figure
from ptq.certify.measuring import certify
from tests.ptq.certify import planting

FOLDER = Path(os.environ.get("PTQ_REAL_MODEL", "/no/model"))
RUN = Path(os.environ.get("PTQ_REAL_RUN", "/no/run"))
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
