"""How commands are told to speculate, and what they tell of it."""

import argparse
import json

import pytest

from formats.command import run_command
from inference import predict
from inference.arguments import add_speculate_arguments, speculate_config
from inference.config import SpeculateConfig
from inference.server.arguments import parser, sizes
from tests.inference.predicting import answered


def read(*given: str) -> SpeculateConfig | None:
    own = argparse.ArgumentParser()
    add_speculate_arguments(own)
    return speculate_config(own.parse_args(given))


def test_methods_and_depths_are_read():
    assert read() is None
    assert read("--speculate", "ngram") == SpeculateConfig(method="ngram")
    assert read("--speculate", "suffix", "--depth", "auto") == SpeculateConfig(method="suffix")
    found = read("--speculate", "draft=a=b", "--depth", "4")
    assert found == SpeculateConfig(method="draft", path="a=b", depth=4)
    assert read("--speculate", "mtp") == SpeculateConfig(method="mtp")
    assert read("--speculate", "mtp=a") == SpeculateConfig(method="mtp", path="a")
    assert sizes(parser().parse_args(["x", "--speculate", "ngram"])).speculate is not None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--speculate", "ngrm"), "ngram"),
        (("--speculate", "eagle"), "eagle=PATH, the folder of a head"),
        (("--speculate", "mtp="), "give mtp"),
        (("--speculate", "draft"), "draft=PATH, the folder"),
        (("--speculate", "ngram=3"), "give ngram"),
        (("--speculate", "ngram", "--depth", "65"), "allowed are auto and 1 to 64"),
    ],
)
def test_what_is_wrong_is_told_with_what_is_allowed(given, told, capsys):
    with pytest.raises(SystemExit):
        read(*given)
    assert told in capsys.readouterr().err


def test_a_depth_needs_a_method(capsys):
    assert run_command(predict.main, ["recipes/tiny-python", "--prompt", "a", "--depth", "2"]) == 2
    assert "give --speculate, too" in capsys.readouterr().err


def test_rows_are_answered_alike_and_told_how_many_drafts_came(tmp_path, tiny_llama, capsys):
    outputs, longer = [], ["--quiet", "--max-tokens", "40"]
    for reference in ("", "x = x + 1\n" * 3):
        asked = {"src": "def f", "reference": reference}
        for more in ([], ["--speculate", "ngram", "--depth", "3"]):
            (row,) = answered(tiny_llama, tmp_path, asked, options=[*longer, *more])
            outputs.append(row["output"])
            assert ("drafts" in capsys.readouterr().out) == bool(more)
    assert len(set(outputs)) == 1


def test_a_reference_is_a_text(tmp_path, tiny_llama, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"src": "def f", "reference": 3}) + "\n")
    given = ["--input", str(rows), "--output", str(tmp_path / "out.jsonl")]
    assert run_command(predict.main, [str(tiny_llama), *given]) == 2
    assert "'reference' is 3; needed is a text or null" in capsys.readouterr().err
