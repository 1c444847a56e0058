"""Prose and chats of a model with a chat template: both measured, and said what it is calibrated on."""

from __future__ import annotations

import json
import shutil

import pytest

from ptq import cli
from ptq.report.data import ReportData
from ptq.report.report import render_markdown, top_of
from ptq.report.verdict import verdict_of
from tests.ptq.quantizing import settings
from tests.ptq.report.conftest import write_smoothed

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
CHAT = [{"role": "user", "content": "What is x?"}, {"role": "assistant", "content": "return x"}]
WARNING = "the model has a chat template, and these data are no chats: 1 of 4 sequences"


@pytest.fixture(scope="module")
def here(tmp_path_factory, tiny_llama):
    """A folder with a recipe for a model that has a chat template."""
    folder = tmp_path_factory.mktemp("kinds")
    shutil.copytree(tiny_llama, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    write_smoothed(folder, folder / "model", attribution=False, completions=0)
    rows = [
        {"id": f"row {i}", "dialogue": [{**CHAT[0], "content": f"{i}?"}, CHAT[1]]}
        for i in range(99)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, [{"dialogue": None}, *rows])))
    return folder


@pytest.fixture(scope="module")
def ran(here) -> ReportData:
    assert cli.main(["run", str(here / "r.yaml"), "--quiet"]) in (0, 1)
    return ReportData.model_validate_json((here / "out/report/report.json").read_bytes())


def test_the_report_measures_the_text_in_the_template_too(ran):
    assert ran.also is not None
    assert (ran.evaluation.kind, ran.also.text.kind) == ("prose", "chat")
    assert ran.also.accuracy.kl_mean > 0
    assert ran.also.accuracy.kl_mean != ran.accuracy.kl_mean
    page = render_markdown(ran)
    assert "mean KL, chat" in page
    assert "| chat | " in page
    assert "| plain text | " in page
    assert "prose" not in page.lower(), "it may be code"


def test_the_report_keeps_that_the_data_are_no_chats(ran):
    assert ran.quantization.calibration.warning.startswith(WARNING)
    told = [point.text for point in top_of(ran).points if point.label == "Careful"]
    assert sum(WARNING in text for text in told) == 1


def test_that_one_kind_loses_far_more_is_a_doubt(ran):
    assert ran.also is not None
    more = ran.also.accuracy.model_copy(update={"kl_mean": 2 * ran.accuracy.kl_mean})
    worse = ran.model_copy(update={"also": ran.also.model_copy(update={"accuracy": more})})
    assert any("chat loses 2.0 times what plain text does" in d for d in verdict_of(worse).doubts)
    same = ran.also.model_copy(update={"accuracy": ran.accuracy})
    even = ran.model_copy(update={"also": same})
    assert not any("times what" in doubt for doubt in verdict_of(even).doubts)


def test_plan_and_run_say_what_was_taken_and_what_speaks_against_it(here, ran, capsys):
    assert cli.main(["check", str(here / "r.yaml"), "--no-time"]) == 0
    out = capsys.readouterr().out
    assert out.count(WARNING) == 1
    assert "also         " in out
    words = [str(here / "model"), "--scheme", "w8", "--data", str(here / "rows.jsonl")]
    output = ["--output", str(here / "chats"), "--quiet"]
    assert cli.main(["quantize", *words, *settings(), *output]) in (0, 1)
    out = capsys.readouterr().out
    assert out.count("rows.jsonl: chats of the column 'dialogue'") == 1
    assert out.count("1 of 100 documents are blank, null or empty chats: left out") == 1
    assert "no chats" not in out


def test_a_model_without_a_template_is_measured_on_its_text_alone(made):
    assert made.data.also is None
    assert made.data.quantization.calibration.warning == ""
