"""The report: thresholds, figures of a real run, a page that needs nothing else, and the command."""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import torch

from calibrate.data import load_tokens
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RequestError
from formats.namespace import ROOT
from inference.accuracy import compare
from inference.engine import Engine
from inference.requests.request import SamplingParams
from ptq.commands import compare as runs
from ptq.commands import report as command
from ptq.methods.common.events import Event
from ptq.peers.measure import PeerRow
from ptq.plan.plan import build_plan
from ptq.recipe.own_model import shipped_paths
from ptq.recipe.peers import QUANTIZERS, Quantizer
from ptq.recipe.reading import load_recipe
from ptq.recipe.schema import Recipe, ThresholdsSpec
from ptq.report import comparison
from ptq.report.data import ReportData, check_thresholds, failure
from ptq.report.generated import DraftPair
from ptq.report.inspection import OutlierRow, distinct_inputs
from ptq.report.measure import long_text, spread
from ptq.report.page import Table
from ptq.report.parts import accuracy as accuracy_part
from ptq.report.parts.loss import READERS, grid_of
from ptq.report.report import (
    draw_plots,
    in_a_line,
    make_report,
    render_html,
    render_markdown,
    sections,
    write_report,
)
from ptq.report.verdict import summary_rows, verdict_of
from ptq.result import load_result
from tests.ptq.report.conftest import measured, thresholds
from tests.refusals import refused_checkpoint, refused_request


class Page(HTMLParser):
    """Collects what a page refers to, its text, and whether its elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.stack: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_figures_are_those_of_the_two_engines(made, folder):
    recipe: Recipe = load_recipe(folder / "r.yaml")
    original = Engine.from_pretrained(recipe.model.path)
    quantized = Engine.from_pretrained(folder / "out" / "checkpoint")
    tokens = load_tokens(recipe.dataset, original.tokenizer, "evaluation")
    data = made.data
    assert data.accuracy == compare(original, quantized, tokens.sequences())
    assert data.accuracy.kl_mean > 0
    assert data.evaluation.fingerprint == tokens.fingerprint
    assert data.evaluation.fingerprint != data.quantization.calibration.fingerprint
    assert data.sizes.original_weights == original.checkpoint.nbytes
    assert data.sizes.quantized_weights == quantized.checkpoint.nbytes < original.checkpoint.nbytes
    assert data.sizes.original_kv == 2 * 2 * 2 * 32 * 2  # K and V, layers, heads, dim, bf16
    assert data.sizes.quantized_kv == data.sizes.original_kv // 2
    assert data.sizes.quantized_kv_here == quantized.kv_bytes_per_token == data.sizes.quantized_kv
    assert data.scale_table == quantized.checkpoint.scale_table
    assert [row.module for row in data.kv_scales] == list(quantized.checkpoint.kv_scales)
    assert data.speed is not None
    assert data.speed.quantized.batch == 2


def test_a_run_that_keeps_its_thresholds_passes(made):
    assert made.passed
    assert made.failures == ()
    names = [check.name for check in made.data.checks]
    assert names == ["perplexity_ratio", "kl", "top1_agreement"]


def test_summary_rows_hold_both_models(made):
    head, *rows = made.summary_rows
    assert head == ("", "original", "quantized", "change")
    names = [row[0].removesuffix(", loaded machine") for row in rows]
    assert names[:3] == ["weights", "cache per token", "perplexity"]
    assert names[-2:] == ["prefill tokens/s", "decode tokens/s"]
    assert all(len(row) == 4 for row in rows)
    assert rows[1][1:] == ("512 B", "256 B", "x 0.50")


def test_speeds_measured_beside_other_work_are_marked(made):
    speed = made.data.speed
    assert speed.load_average >= 0
    assert speed.cores == os.cpu_count()
    for load, marked in ((None, False), (4.4, False), (4.6, True), (9, True)):
        update = {"load_average": load, "cores": 4}
        data = made.data.model_copy(update={"speed": speed.model_copy(update=update)})
        rows = [row[0] for row in summary_rows(data)[-2:]]
        ends = ", loaded machine" if marked else ""
        assert rows == [f"prefill tokens/s{ends}", f"decode tokens/s{ends}"]
        words = " ".join(Page(render_html(data, {})).words)
        assert (f"load average {load or 0:.1f} on 4 cores" in words) is marked
        assert f'"load_average": {json.dumps(load and float(load))}' in data.model_dump_json(
            indent=1
        )


@pytest.mark.parametrize(
    ("limits", "holds"),
    [
        ({"perplexity_ratio": 1.02}, True),
        ({"perplexity_ratio": 1.0199}, False),
        ({"kl": 0.5}, True),
        ({"kl": 0.49}, False),
        ({"top1_agreement": 0.9}, True),
        ({"top1_agreement": 0.91}, False),
        ({"kl": 0.49, "top1_agreement": 0.9}, False),
        ({}, True),
    ],
)
def test_thresholds_decide(made, limits, holds):
    data = measured(made.data, perplexity_ratio=1.02, kl_mean=0.5, top1_agreement=0.9)
    judged = thresholds(data, **limits)
    assert judged.passed is holds
    words = {"holds", "MISSED"} & set(Page(render_html(judged, {})).words)
    assert ("MISSED" in words) is not holds
    verdict = "passed" if holds and limits else "failed" if limits else "open"
    assert f'class="verdict {verdict}"' in render_html(judged, {})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_a_number_never_holds(made, value):
    broken = made.data.accuracy.model_copy(update={"perplexity_ratio": value, "kl_mean": value})
    checks = check_thresholds(ThresholdsSpec(perplexity_ratio=2.0, kl=2.0), broken)
    assert [check.holds for check in checks] == [False, False]


def test_a_failure_says_what_was_measured_and_allowed(made):
    accuracy = made.data.accuracy.model_copy(update={"top1_agreement": 0.8, "kl_mean": 0.25})
    texts = [
        failure(check)
        for check in check_thresholds(ThresholdsSpec(kl=0.1, top1_agreement=0.9), accuracy)
    ]
    assert texts == [
        "mean KL (nats) 0.25 is above the threshold 0.1 (report.thresholds.kl)",
        "top-1 agreement 0.8 is below the threshold 0.9 (report.thresholds.top1_agreement)",
    ]


def test_the_page_is_whole_and_loads_nothing(made):
    text = (made.folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.stack == []
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    panels = sum(map(len, draw_plots(made.data).values()))
    assert len(page.references) == page.tags.count("img") == panels == 18
    assert all(ref.startswith("data:image/svg+xml;base64,") for ref in page.references)
    assert not re.search(r"https?:|@import|url\(", text)
    for reference in page.references:
        svg = base64.b64decode(reference.partition(",")[2]).decode()
        assert svg.startswith("<svg")
        outside = set(re.findall(r"https?://[^\"'<>) ]+", svg))
        assert outside <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_names_are_text_and_never_markup(made):
    evil = "<script>alert('&')</script>|`x`"
    event = Event(module=evil, kind="clipping", message=evil)
    record = made.data.quantization.model_copy(update={"events": (event,)})
    recipe = f"{made.data.recipe}# {evil}\n"
    data = made.data.model_copy(update={"title": evil, "quantization": record, "recipe": recipe})
    page = Page(text := render_html(data, draw_plots(data)))
    assert "<script" not in text
    assert page.words.count(evil) == 2  # in the head and as headline
    assert page.words.count(recipe) == 1
    assert any(word == f"{evil}: {evil} (clipping)" for word in page.words)
    shown = render_markdown(data)
    assert "<script" not in shown.replace(f"```yaml\n{recipe}```", "")


def test_markdown_tables_have_equal_rows(made):
    text = (made.folder / "report.md").read_text(encoding="utf-8")
    widths: list[int] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            widths.append(len(re.findall(r"(?<!\\)\|", line)))
        else:
            assert len(set(widths)) <= 1, text
            widths = []
    assert text.count("\n## ") == len(list(sections(made.data)))


def test_json_holds_everything_and_reads_back(made):
    text = (made.folder / "report.json").read_text(encoding="utf-8")
    assert ReportData.model_validate_json(text) == made.data
    accuracy = json.loads(text)["accuracy"]
    assert accuracy["perplexity_ratio"] == made.data.accuracy.perplexity_ratio
    assert {"kl_mean", "tokens"} <= set(accuracy)


def recipe_in_page(text: str) -> str:
    """What a person copies out of the page's recipe."""
    return next(word for word in reversed(Page(text).words) if word.startswith("# Every setting"))


def recipe_in_markdown(text: str) -> str:
    return text.rpartition("```yaml\n")[2].rpartition("```")[0]


def test_the_recipe_in_the_report_repeats_the_run_from_anywhere(
    made, folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, taken in (("report.html", recipe_in_page), ("report.md", recipe_in_markdown)):
        file = tmp_path / f"{name}.yaml"
        file.write_text(taken((made.folder / name).read_text(encoding="utf-8")), encoding="utf-8")
        assert load_recipe(file) == load_recipe(folder / "r.yaml")


def test_the_report_says_what_ran_where_and_when(made, folder, tiny_llama):
    shown = made.data.provenance
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", shown.made)
    assert shown.versions["torch"] == torch.__version__
    for name in ("report.html", "report.md"):
        text = (made.folder / name).read_text(encoding="utf-8")
        words = " ".join(Page(text).words if name.endswith("html") else [text.replace("\\", "")])
        for fact in (
            *(shown.made, shown.device, *map(" ".join, shown.versions.items())),
            *map(str, (tiny_llama, folder / "text.py", folder / "out" / "checkpoint")),
        ):
            assert fact in words, (name, fact)


def test_no_text_speaks_of_a_ratio_that_its_table_lacks(made):
    def cache_text(data: ReportData) -> tuple[str, Table]:
        (section,) = [s for s in sections(data) if s.title == "Cache scales"]
        return section.text, section.tables[0]

    text, table = cache_text(made.data)
    assert "SQNR (dB)" in table.columns
    assert "SQNR in the table" in text
    entries = (e.model_copy(update={"sqnr_db": None}) for e in made.data.scale_table.entries)
    unmeasured = made.data.scale_table.model_copy(update={"entries": tuple(entries)})
    text, _ = cache_text(made.data.model_copy(update={"scale_table": unmeasured}))
    assert "SQNR" not in text
    assert "ratio" not in text


def test_equal_data_give_equal_files(made, tmp_path):
    write_report(made.data, tmp_path / "again")
    for name in ("report.html", "report.md", "report.json"):
        assert (tmp_path / "again" / name).read_bytes() == (made.folder / name).read_bytes(), name


@pytest.mark.usefixtures("unpictured")
def test_a_report_that_cannot_be_written_leaves_the_old_one(made, tmp_path, monkeypatch):
    folder = tmp_path / "report"
    write_report(made.data, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ptq.report.report.render_markdown", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        write_report(made.data.model_copy(update={"title": "new"}), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_every_smoothed_group_is_drawn_at_its_block_and_in_its_color(made):
    sources = [row.source for row in made.data.quantization.smoothing]
    kinds, blocks = grid_of(sources)
    assert {name.rpartition(".")[2] for name in sources} == set(kinds)
    assert set(kinds) <= READERS.keys()
    assert all(block.isdecimal() for block in blocks)
    _, blocks = grid_of([f"model.layers.{i}.self_attn.q_proj" for i in ("10", "2", "0")])
    assert list(blocks) == ["0", "2", "10"], "statistics are stored by name, where 10 is before 2"


def test_reports_without_speed_smoothing_or_cache_have_fewer_sections(made):
    record = made.data.quantization.model_copy(update={"smoothing": (), "modules": ()})
    empty = {"speed": None, "kv_scales": (), "outliers": (), "quantization": record}
    empty |= {"attribution": "not asked for", "completions": ()}
    data = made.data.model_copy(update=empty)
    titles = [section.title for section in sections(data)]
    assert "Cache scales" not in titles
    assert "Activations and smoothing" not in titles
    assert "Side by side" not in titles
    assert set(draw_plots(data)) == {"perplexity", "divergence", "sizes"}
    assert not any("tokens/s" in row[0] for row in summary_rows(data))
    assert not any("drafts" in row[0] for row in summary_rows(data))
    drafting = data.model_copy(update={"drafts": DraftPair(original=2.0, quantized=1.5)})
    row = ("tokens a step, mtp drafts", "2.00", "1.50", "x 0.75")
    assert row in summary_rows(drafting)
    Page(render_html(data, draw_plots(data)))


def test_lossless_layers_and_equal_models_can_be_drawn(made):
    lossless = {"output_sqnr_db": None, "baseline_output_sqnr_db": None}
    rows = tuple(row.model_copy(update=lossless) for row in made.data.quantization.modules)
    record = made.data.quantization.model_copy(update={"modules": rows})
    zero = {f"kl_{name}": 0.0 for name in ("mean", "p50", "p90", "p99", "max")}
    data = made.data.model_copy(update={"quantization": record})
    data = measured(data, **zero, perplexity_ratio_ci=None, perplexity_original_ci=None)
    assert all(svg.endswith("</svg>\n") for panels in draw_plots(data).values() for svg in panels)


def test_layers_that_share_an_input_are_shown_once():
    def row(name: str, absmax: float, role: str = "input") -> OutlierRow:
        return OutlierRow(
            module=name,
            role=role,
            absmax=absmax,
            median=1.0,
            ratio=absmax,
            channels=(3,),
            magnitudes=(absmax,),
        )

    rows = [row(f"m.{i}.attn.{n}_proj", 5.0) for i in (0, 1) for n in "kqv"]
    rows += [row("m.0.attn.o_proj", 2.0), row("m.0.attn", 9.0, "k_cache")]
    assert [r.module for r in distinct_inputs(rows)] == [
        "m.0.attn.q_proj",
        "m.1.attn.q_proj",
        "m.0.attn.o_proj",
    ]


@pytest.mark.usefixtures("unpictured")
def test_the_command_measures_a_moved_run_again(made, folder, tmp_path, monkeypatch, capsys):
    moved = tmp_path / "moved"
    shutil.copytree(folder / "out", moved, ignore=shutil.ignore_patterns("report"))
    monkeypatch.chdir(tmp_path)
    assert command.main(["moved"]) == 0
    out = capsys.readouterr().out
    assert "perplexity" in out
    assert "report: moved/report/report.html" in out
    again = json.loads((moved / "report" / "report.json").read_text())
    assert again["accuracy"] == json.loads(made.data.accuracy.model_dump_json())
    text = (moved / "recipe.yaml").read_text()
    (moved / "recipe.yaml").write_text(text.replace("kl: 5.0", "kl: 1.0e-09"))
    assert command.main(["moved"]) == 1
    assert "FAILED: mean KL (nats) " in capsys.readouterr().out


def test_other_tools_stand_beside_the_run(made):
    better = made.data.accuracy.model_copy(update={"kl_mean": 0.125, "kl_mean_ci": (0.1, 0.15)})
    about = {"method": "int4, RTN", "package": "p", "version": "1.5", "threads": 3}
    rows = (
        PeerRow(name="a|b", seconds=7.25, peak_rss_bytes=9_000_000, accuracy=better, **about),
        PeerRow(name="c", error="it <broke>", **about),
    )
    record = made.data.quantization.model_copy(update={"smoothing": (), "modules": ()})
    empty = {"kv_scales": (), "outliers": (), "quantization": record}  # fewer plots to draw
    empty |= {"attribution": "not asked for"}
    data = made.data.model_copy(update=empty | {"peers": rows})
    (section,) = [s for s in sections(data) if s.title == "Beside other tools"]
    assert [s for s in sections(made.data) if s.title == "Beside other tools"] == []
    ((head, own, first, second),) = [[t.columns, *t.rows] for t in section.tables]
    assert len(head) == len(own) == len(first) == len(second)
    assert own[:3] == (
        "this run",
        "a8w8c8, smoothquant, rtn",
        f"{data.accuracy.perplexity_ratio:.4f}",
    )
    assert first[4:6] == ("0.125", "0.1 to 0.15")
    assert first[7:] == ("7.2 s", "9 MB", "3", "p 1.5")
    assert second[2:8] == ("", "", "", "", "", "could not run")
    plots = draw_plots(data)
    assert set(plots) == {"perplexity", "divergence", "sizes", "peers"}
    for panel in plots["peers"]:
        assert panel.count("<!-- a|b -->") == 1
        assert "<!-- c -->" not in panel
    page = Page(render_html(data, plots))
    assert "c could not run: it <broke>" in page.words
    assert page.tags.count("img") == sum(map(len, plots.values())) == 11
    assert "| a\\|b | int4, RTN |" in render_markdown(data)
    failed = data.model_copy(update={"peers": rows[1:]})
    assert "peers" not in draw_plots(failed)


@pytest.mark.usefixtures("unpictured")
def test_a_peer_that_fails_does_not_fail_the_report(folder, made, tmp_path, monkeypatch):
    adapter = tmp_path / "adapter.py"
    adapter.write_text("raise ValueError('broken')")
    monkeypatch.setitem(QUANTIZERS, "fake", Quantizer("torch", (), adapter, "rounding"))
    peers = json.dumps([{"name": "fake", "python": sys.executable}])
    out = Path(shutil.copytree(folder / "out", tmp_path / "out"))
    settings = [f"report.peers={peers}", "report.speed=false", f"output.path={out}"]
    recipe = load_recipe(folder / "r.yaml", settings)
    plan = build_plan(recipe, Checkpoint.open(recipe.model.path), force=True)
    report = make_report(load_result(out), plan, progress=False)
    assert [(row.name, row.error) for row in report.data.peers] == [("fake", "ValueError: broken")]
    assert report.passed
    assert report.data.accuracy == made.data.accuracy
    assert "fake could not run: ValueError: broken" in (report.folder / "report.md").read_text()


def test_a_folder_without_a_run_is_refused(tmp_path):
    refused_checkpoint(r"quantization\.json", command.main, [str(tmp_path)])


def test_runs_of_one_model_compare(made, tmp_path, capsys):
    outputs = [tmp_path / name for name in ("first", "second", "third")]
    for output, kl in zip(outputs, (0.000124, 0.0000815, 0.75), strict=True):
        (output / "report").mkdir(parents=True)
        data = json.loads((made.folder / "report.json").read_text())
        data["accuracy"]["kl_mean"] = kl
        if output.name == "third":
            data["evaluation"]["fingerprint"] = "other"
        (output / "report" / "report.json").write_text(json.dumps(data))
    files = ["--markdown", str(tmp_path / "t.md"), "--plot", str(tmp_path / "p.svg")]
    assert runs.main([*map(str, outputs[:2]), *files]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "t.md").read_text()
    rows = [line.split(" | ") for line in printed.splitlines()[2:]]
    assert [row[0] for row in rows] == ["| `second`", "| `first`"]
    assert rows[0][1:3] == ["a8w8c8", "smoothquant, rtn"]
    assert [row[6] for row in rows] == ["8.15e-05", "0.000124"], "small losses are told apart"
    assert all(row[8].startswith("x ") for row in rows)
    svg = (tmp_path / "p.svg").read_text()
    assert svg.count("<!-- first -->") == svg.count("<!-- second -->") == 1
    with pytest.raises(RequestError, match="third and first were not measured on the same tokens"):
        runs.main([str(path) for path in outputs])
    refused_request("two of the outputs", runs.main, [str(outputs[0]), str(outputs[0])])


@pytest.mark.parametrize(
    ("ends", "limit", "light", "doubted"),
    [
        ((1.01, 1.02), 1.03, "green", False),
        ((1.01, 1.02), 1.017, "amber", True),  # holds, but the interval reaches over it
        ((1.01, 1.02), 1.012, "red", True),
        ((1.01, 1.02), 1.001, "red", False),
        (None, 1.03, "amber", True),  # one sequence tells nothing of chance
    ],
)
def test_the_verdict_tells_chance_from_loss(made, ends, limit, light, doubted):
    figures = {"perplexity_ratio": 1.015, "sequences": 64, "tokens": 30_000}
    data = measured(made.data, perplexity_ratio_ci=ends, **figures)
    verdict = verdict_of(thresholds(data, perplexity_ratio=limit))
    assert verdict.light == light
    assert verdict.headline.lower().startswith(light)
    assert bool(verdict.doubts) is doubted
    assert ("sequences cannot tell it" in " ".join(verdict.doubts)) is doubted
    assert verdict.outcome == ("failed" if light == "red" else "passed")
    if light == "green":
        (margin,) = verdict.margins
        assert margin.endswith(
            "1.0150 (95% interval 1.0100 to 1.0200) keeps the threshold 1.03 by 3 times "
            "half that interval's width"
        )


def test_few_tokens_are_a_doubt_whatever_they_say(made):
    assert made.data.accuracy.sequences < 8
    (first, *_) = verdict_of(made.data).doubts
    assert first.startswith("4 sequences with 188 predictions are too few to trust")
    shown = render_markdown(made.data)
    assert "- **Careful**: 4 sequences with 188 predictions" in shown


def test_an_original_that_does_not_know_the_text_is_a_doubt(made):
    """As where its tokenizer was converted without its BOS token."""
    for perplexity, doubted in ((20.4, False), (30_510.0, True)):
        data = measured(made.data, perplexity_original=perplexity)
        assert ("a perplexity of 30,510" in " ".join(verdict_of(data).doubts)) is doubted
        assert ("Careful: the original itself" in in_a_line(data)) is doubted


def test_the_text_that_shows_what_a_cache_loses_far_into_a_context():
    """The first token of all sequences is in it once; half of all tokens, within a context."""
    sequences = [torch.tensor([9, 10 * i, 10 * i + 1]) for i in range(1, 8)]
    text = long_text(sequences, 100)
    assert text is not None
    assert text.tolist() == [9, 10, 11, 20, 21, 30, 31]
    assert len(long_text(sequences, 6)) == 6
    assert long_text(sequences, 5) is None
    assert long_text(sequences[:3], 100) is None
    others = [torch.tensor([i, i]) for i in range(6)]
    assert long_text(others, 100).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("far", "doubted"), [(1.0, False), (1.4, False), (1.6, True)])
def test_what_is_lost_far_into_a_context_is_a_doubt(made, far, doubted):
    accuracy = made.data.accuracy
    further = accuracy.model_copy(update={"kl_mean": far * accuracy.kl_mean, "tokens": 300})
    data = made.data.model_copy(update={"further": further})
    start = accuracy.positions[-1].end + 1
    said = f"tokens {start} to {start + 300} of a text lose 1.6 times"
    assert (said in " ".join(verdict_of(data).doubts)) is doubted
    assert f"mean KL, tokens {start} to {start + 300}" in {row[0] for row in summary_rows(data)}


def test_the_ratio_has_a_tick_at_one_and_at_its_threshold(made):
    for limit in (1.01, 1.5):
        _, ratio = accuracy_part._draw_perplexity(thresholds(made.data, perplexity_ratio=limit))
        ticks = [label.get_text() for label in ratio.get_xticklabels()]
        low, high = ratio.get_xlim()
        assert "1.000" in ticks
        assert low < 1 < high
        assert low < limit < high
        assert (f"{limit:.3f}" in ticks) or abs(limit - 1) < 0.16 * (high - low)


def test_no_axis_is_cut_where_nothing_tells_chance_from_loss(made):
    *_, top1 = accuracy_part._draw_divergence(made.data.accuracy)
    assert len(top1.lines) == 2 * len(made.data.accuracy.positions)  # each has an interval
    buckets = tuple(b.model_copy(update={"top1_ci": None}) for b in made.data.accuracy.positions)
    *_, top1 = accuracy_part._draw_divergence(
        made.data.accuracy.model_copy(update={"positions": buckets})
    )
    assert top1.get_ylim()[0] == 0
    assert top1.get_ylim()[1] >= 100


def test_what_has_a_logarithmic_axis_is_drawn_as_dots(made):
    for section in sections(made.data):
        for plot in section.plots:
            for axes in plot.draw():
                if "log" in (axes.get_xscale(), axes.get_yscale()):
                    assert axes.lines, plot.name
                    assert not axes.patches, plot.name


def test_runs_that_none_beats_are_on_the_line():
    points = [(0.5, 0.03), (0.6, 0.01), (0.6, 0.02), (1.0, 0.01), (0.4, 0.1), (0.7, 0.05)]
    assert comparison.pareto(points) == [(0.4, 0.1), (0.5, 0.03), (0.6, 0.01)]


def test_labels_are_moved_apart_and_no_farther():
    step = comparison.APART
    assert comparison._moved_apart([0.1, 0.5]) == [0.1, 0.5]
    low, middle, high = comparison._moved_apart([0.3, 0.3, 0.3])
    assert (low, middle, high) == pytest.approx((0.3 - step, 0.3, 0.3 + step))
    crowd = [0.2 + 0.001 * i for i in range(20)]
    moved = comparison._moved_apart(crowd)
    assert all(b - a > 0.999 * step for a, b in itertools.pairwise(moved))
    assert sum(moved) == pytest.approx(sum(crowd))


def test_other_tools_stand_at_the_size_of_runs_of_as_many_bits():
    rows = [
        {
            "run": "ours",
            "scheme": "a8w4c8",
            "methods": "gptq",
            "weights": 0.4,
            "cache": 0.5,
            "kl": 0.03,
        },
        {"run": "theirs", "scheme": "p 1", "methods": "int4, GPTQ", "kl": 0.05},
        {"run": "wide", "scheme": "p 1", "methods": "int8", "kl": 0.05},  # no run of ours has 8
    ]
    points = list(comparison._points(pd.DataFrame(rows)))
    assert [(p.name, p.size, p.tool) for p in points] == [
        ("ours", 0.4, False),
        ("theirs (p 1)", 0.4, True),
        ("wide (p 1)", comparison.UNKNOWN, True),
    ]
    assert comparison.draw(pd.DataFrame(rows)).count("<!-- theirs (p 1) -->") == 1


def test_the_plot_of_results_shows_every_recipe():
    folder = ROOT / "recipes"
    drawn = (folder / "results.svg").read_text(encoding="utf-8")
    for name in shipped_paths():
        if "/" not in name:
            assert drawn.count(f"<!-- {name} -->") == 1, name


def test_completions_of_both_models_stand_side_by_side(made, folder):
    rows = made.data.completions
    assert len(rows) == 3
    recipe = load_recipe(folder / "r.yaml")
    original = Engine.from_pretrained(recipe.model.path)
    tokens = load_tokens(recipe.dataset, original.tokenizer, "evaluation")
    assert [row.prompt for row in rows] == [
        original.tokenizer.decode(ids[:24]) for ids in spread(tokens.sequences(), 3)
    ]
    for row in rows:
        params = SamplingParams(max_tokens=24)
        (output,) = original.generate([original.tokenizer(row.prompt)["input_ids"]], params)
        assert output.text == row.original
        same, first, second = row.common, row.original, row.quantized
        assert first[:same] == second[:same]
        assert first[same : same + 1] != second[same : same + 1] or first == second
    other = made.data.completions[0].model_copy(
        update={"original": "a <b> c", "quantized": "a <d> c", "common": 3}
    )
    data = made.data.model_copy(update={"completions": (other,)})
    page = render_html(data, {})
    assert "<pre>a &lt;<mark>b&gt; c</mark></pre>" in page
    assert "<pre>a &lt;<mark>d&gt; c</mark></pre>" in page
    assert "    a <d> c\n" in render_markdown(data)
