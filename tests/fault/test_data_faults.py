"""Data that cannot be used: one clear error each, with what to do."""

import json

import pytest
from transformers import AutoTokenizer

from calibrate.data import load_tokens
from calibrate.sources import guess_columns
from calibrate.spec import DatasetSpec, SplitSpec
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


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("text", ["<|endoftext|>", "<|endoftext|>" * 30, "  \n", ""])
def test_nothing_but_padding(tokenizer, tmp_path, pack, text):
    rows = [json.dumps({"text": text * n}) for n in range(1, 50)]
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    refused(tokenizer, tmp_path, "d.jsonl", "padding", name="d.jsonl", pack=pack)


def test_not_utf8(tokenizer, tmp_path):
    (tmp_path / "d.txt").write_bytes(b"fine\n" * 10 + b"\xff\xfe" + b"fine\n")
    refused(tokenizer, tmp_path, "d.txt", "byte 50", "UTF-8", name="d.txt")


def test_half_a_surrogate_pair(tokenizer, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": "fine"}\n{"text": "\\ud800"}')
    refused(tokenizer, tmp_path, "d.jsonl", "row 2", "surrogate", name="d.jsonl")


@pytest.mark.parametrize("name", ["absent.txt", "./absent", "/absent/data.parquet"])
def test_absent(tokenizer, tmp_path, name):
    refused(tokenizer, tmp_path, "does not exist", name=name)


def test_a_folder_without_data(tokenizer, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.pdf").write_text("a")
    refused(tokenizer, tmp_path, ".jsonl", name="d")


def test_a_column_that_is_not_there(tokenizer, tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps({"texts": "x", "id": 1}))
    refused(tokenizer, tmp_path, "d.jsonl:1", "did you mean 'texts'", name="d.jsonl")


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"conversations": [], "id": 1}, "set dataset.messages_column: conversations"),
        ({"messages": [], "src": "x"}, "set dataset.messages_column: messages"),
        ({"src": "x", "tgt": "y"}, "Set dataset.column: src"),
        ({"a": 1}, "Set dataset.column or dataset.messages_column"),
    ],
)
def test_the_setting_that_reads_the_rows_is_told(tokenizer, tmp_path, row, remedy):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "d.parquet")
    for name in ("d.jsonl", "d.parquet"):
        refused(tokenizer, tmp_path, "no column 'text'", remedy, name=name)


@pytest.mark.parametrize("row", ["", '{"a": 1}', '{"question": "x", "answer": "y"}'])
def test_rows_whose_column_cannot_be_guessed(tmp_path, row):
    (tmp_path / "d.jsonl").write_text(row)
    with pytest.raises(RecipeError, match="cannot tell which column to read") as caught:
        guess_columns(tmp_path / "d.jsonl")
    assert ("it holds no rows" in str(caught.value)) == (not row)


ANSWER = [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"prompt": "x", "chosen": "good", "rejected": "bad"},
            (
                "prompt (text), chosen (text)",
                "`--set dataset.column=chosen`",
                "put both, of preferences the chosen one, together",
            ),
        ),
        (
            {"prompt": [{"role": "user", "content": "x"}], "chosen": ANSWER, "rejected": ANSWER},
            ("prompt (chats), chosen (list)", "put both, of preferences the chosen one"),
        ),
        (
            {"prompt": [{"role": "user", "content": "x"}], "completion": ANSWER},
            ("prompt (chats), completion (list)", "a prompt and its answer are apart"),
        ),
        (
            {"instruction": "x", "input": "", "output": "y"},
            ("instruction (text), input (empty)", "a prompt and its answer are apart"),
        ),
        ({"id": "sample-1", "n": 3}, ("id (text), n (int)", "`--set dataset.column=id`")),
        (
            {"a": [{"role": "user", "content": "x"}], "b": [{"role": "user", "content": "y"}]},
            ("`--set dataset.messages_column=a` or `--set dataset.messages_column=b`",),
        ),
        ({"messages": str([{"role": "user"}])}, ("messages (chats as Python prints them: write",)),
        ({"id": 1, "n": 3}, ("None of them holds text",)),
    ],
)
def test_columns_that_could_be_anything_are_not_taken(tmp_path, row, words):
    """Neither name nor shape says what they are: a person says it, and reads how."""
    (tmp_path / "d.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    with pytest.raises(RecipeError, match="cannot tell which column to read") as caught:
        guess_columns(tmp_path / "d.jsonl")
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("d.json", "[1]", ("row 1", "a row is an object")),
        ("d.json", '[{"text": "x"}', ("d.json: not JSON",)),
        ("d.csv", 'text\n"open', ("not a readable csv file",)),
        ("d.csv", "", ("not a readable csv file",)),
        ("d.csv", "text\nsay, what\n", ("more fields than its first line names, 1", '"a, b"')),
        ("d.tsv", "other\nx\n", ("no column 'text'", "other")),
    ],
)
def test_damaged_json_and_csv(tokenizer, tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    refused(tokenizer, tmp_path, *words, name=name)


def test_a_table_of_a_kind_that_is_not_read_is_told_what_to_make_of_it(tmp_path):
    (tmp_path / "d.xlsx").write_text("text\nx\n")
    with pytest.raises(RecipeError, match=r"d\.xlsx.*Known: .*\.jsonl.* make JSON lines"):
        guess_columns(tmp_path / "d.xlsx")


def test_a_speaker_that_is_not_known(tokenizer, tmp_path, monkeypatch):
    row = {"conversations": [{"from": "narrator", "value": "once"}]}
    (tmp_path / "c.jsonl").write_text(json.dumps(row))
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages }}")
    values = {"name": "c.jsonl", "messages_column": "conversations"}
    refused(tokenizer, tmp_path, "c.jsonl", "row 1", "'narrator'", "human", **values)


def test_a_column_that_is_no_text(tokenizer, tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": [{"role": "user"}]}))
    refused(tokenizer, tmp_path, "list, not text", "messages_column", name="d.jsonl")


@pytest.mark.parametrize("line", ["{", "[1]", "text"])
def test_rows_that_are_no_json(tokenizer, tmp_path, line):
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n' + line)
    refused(tokenizer, tmp_path, "d.jsonl:2", name="d.jsonl")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_column_that_no_table_has(tokenizer, tmp_path, kind):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, table = tmp_path / f"d.{kind}", pa.table({"contents": ["x"]})
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    values = {"name": path.name, "column": "content"}
    refused(tokenizer, tmp_path, path.name, "did you mean 'contents'", **values)


def test_a_chat_that_the_template_refuses(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": [{"role": "x", "content": "y"}]}))
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    values = {"name": "c.jsonl", "messages_column": "messages"}
    refused(tokenizer, tmp_path, "c.jsonl", "row 1", "must alternate", **values)


@pytest.mark.parametrize("other", ["./d.jsonl", "copy.jsonl", "."])
def test_evaluation_on_calibrations_documents(tokenizer, tmp_path, other):
    rows = "\n".join(json.dumps({"text": f"def f{i}(): return {i}"}) for i in range(40))
    (tmp_path / "d.jsonl").write_text(rows)
    (tmp_path / "copy.jsonl").write_text(rows)
    spec = DatasetSpec(name="d.jsonl", evaluation_name=other, calibration=SMALL, evaluation=SMALL)
    load_tokens(spec, tokenizer, "calibration", tmp_path)
    with pytest.raises(RecipeError, match="would use the documents of calibration"):
        load_tokens(spec, tokenizer, "evaluation", tmp_path)


@pytest.mark.parametrize("key", ["config", "split", "evaluation_split"])
@pytest.mark.parametrize("name", ["stdlib", "d.txt"])
def test_parts_of_a_source_that_has_none(tokenizer, tmp_path, name, key):
    (tmp_path / "d.txt").write_text("some words\n" * 50)
    refused(tokenizer, tmp_path, name, f"dataset.{key}", name=name, **{key: "test"})


def test_a_python_without_its_standard_library(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    refused(tokenizer, tmp_path, "argparse.py", "dataset.name", name="stdlib")


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow"])
def test_damaged_tables(tokenizer, tmp_path, name):
    (tmp_path / name).write_bytes(b"not a table")
    refused(tokenizer, tmp_path, name, "not a readable", name=name)


def test_a_name_that_nobody_knows(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    refused(tokenizer, tmp_path, "datasets.load_dataset", "stdlib", name="no-such/data-set")
