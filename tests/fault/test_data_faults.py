"""Data that cannot be used: one clear error each, with what to do."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from calibrate.data import DatasetSpec, SplitSpec, load_tokens
from formats.errors import RecipeError

SMALL = SplitSpec(samples=3, sequence_length=16)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


def refused(tokenizer, tmp_path, *words: str, **values) -> None:
    spec = DatasetSpec(**({"calibration": SMALL, "evaluation": SMALL} | values))
    with pytest.raises(RecipeError) as caught:
        load_tokens(spec, tokenizer, "calibration", tmp_path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", "{}"])
def test_empty(tokenizer, tmp_path, text):
    (tmp_path / "d.jsonl").write_text(text)
    refused(tokenizer, tmp_path, "d.jsonl", name="d.jsonl")


@pytest.mark.parametrize("pack", [True, False])
def test_too_short(tokenizer, tmp_path, pack):
    (tmp_path / "d.txt").write_text("a few words\nand a few more\n")
    refused(tokenizer, tmp_path, "d.txt", "samples", "found", name="d.txt", pack=pack)


def test_nothing_but_padding(tokenizer, tmp_path):
    rows = [json.dumps({"text": "<|endoftext|>"})] * 50
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    refused(tokenizer, tmp_path, "padding", name="d.jsonl")


def test_not_utf8(tokenizer, tmp_path):
    (tmp_path / "d.txt").write_bytes(b"fine\n" * 10 + b"\xff\xfe" + b"fine\n")
    refused(tokenizer, tmp_path, "d.txt", "byte 50", "UTF-8", name="d.txt")


@pytest.mark.parametrize("name", ["absent.txt", "./absent", "/absent/data.parquet"])
def test_absent(tokenizer, tmp_path, name):
    refused(tokenizer, tmp_path, "does not exist", name=name)


def test_a_folder_without_data(tokenizer, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.csv").write_text("a")
    refused(tokenizer, tmp_path, ".jsonl", name="d")


def test_a_column_that_is_not_there(tokenizer, tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps({"texts": "x", "id": 1}))
    refused(tokenizer, tmp_path, "row 1", "did you mean 'texts'", name="d.jsonl")


def test_a_column_that_is_no_text(tokenizer, tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": [{"role": "user"}]}))
    refused(tokenizer, tmp_path, "list, not text", "messages_column", name="d.jsonl")


@pytest.mark.parametrize("line", ["{", "[1]", "text"])
def test_rows_that_are_no_json(tokenizer, tmp_path, line):
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n' + line)
    refused(tokenizer, tmp_path, "d.jsonl:2", name="d.jsonl")


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow"])
def test_damaged_tables(tokenizer, tmp_path, name):
    (tmp_path / name).write_bytes(b"not a table")
    refused(tokenizer, tmp_path, name, "not a readable", name=name)


def test_a_name_that_nobody_knows(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(tokenizer, tmp_path, "datasets.load_dataset", "stdlib", name="no-such/data-set")
