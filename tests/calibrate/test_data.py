"""Every source, packing and padding, and which documents serve which split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from calibrate.data import TokenSet, load_tokens
from calibrate.sources import (
    STDLIB,
    divided,
    guess_columns,
    local_documents,
    named_documents,
    plain_text,
)
from calibrate.spec import DatasetSpec, SplitSpec
from formats.errors import RecipeError
from tests.refusals import refused_recipe

SMALL = SplitSpec(samples=3, sequence_length=16)
ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


def small(**values) -> DatasetSpec:
    return DatasetSpec(**({"calibration": SMALL, "evaluation": SMALL} | values))


def documents(count=40) -> list[str]:
    return [f"def function_{i}(a, b):\n    return a * {i} + b\n" for i in range(count)]


def write_rows(path: Path, rows: list) -> None:
    """JSON lines; a text is a row with one column."""
    named = [{"text": row} if isinstance(row, str) else row for row in rows]
    path.write_text("\n".join(map(json.dumps, named)))


def both_splits(spec: DatasetSpec, tokenizer, root=None) -> list[TokenSet]:
    return [load_tokens(spec, tokenizer, split, root) for split in ("calibration", "evaluation")]


def test_stdlib_splits_share_no_module(tokenizer):
    assert not set(STDLIB["calibration"]) & set(STDLIB["evaluation"])
    a, b = both_splits(small(), tokenizer)
    assert a.tokens == b.tokens == 48
    assert a.fingerprint != b.fingerprint
    assert a.fingerprint == load_tokens(small(), tokenizer, "calibration").fingerprint


def test_the_default_amounts_are_there(tokenizer):
    for tokens in both_splits(DatasetSpec(), tokenizer):
        assert tokens.ids.shape == (64, 512)
        assert tokens.mask.all()


def test_the_seed_chooses_the_windows(tokenizer):
    spec = small(calibration=SMALL.model_copy(update={"seed": 1}))
    first = load_tokens(small(), tokenizer, "calibration")
    assert load_tokens(spec, tokenizer, "calibration").fingerprint != first.fingerprint


@pytest.mark.parametrize(
    "kind",
    "jsonl parquet arrow folder csv semicolons.csv tsv json strings.json lines.json".split(),
)
def test_local_files_give_the_same_tokens(tokenizer, tmp_path, kind):
    import pandas as pd
    import pyarrow as pa

    texts = documents()
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        write_rows(path, [*texts])
        path.write_text(path.read_text() + "\n\n")
    elif kind == "parquet":
        pd.DataFrame({"text": texts}).to_parquet(path)
    elif kind == "arrow":
        table = pa.table({"text": texts})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind.endswith(("csv", "tsv")):
        frame = pd.DataFrame({"id": range(len(texts)), "text": texts})
        frame.to_csv(path, sep={"csv": ",", "tsv": "\t"}.get(kind, ";"), index=False)
    elif kind.endswith("json"):
        rows = [{"text": text} for text in texts]
        whole = json.dumps(texts if kind == "strings.json" else rows, indent=1)
        path.write_text("\n".join(map(json.dumps, rows)) if kind == "lines.json" else whole)
    else:
        path.mkdir()
        for i, text in enumerate(texts):
            (path / f"{i:03d}.py").write_text(text)
    a, b = both_splits(small(name=path.name), tokenizer, tmp_path)
    assert a.tokens == b.tokens == 48
    write_rows(tmp_path / "reference.jsonl", texts)
    again = load_tokens(small(name="reference.jsonl"), tokenizer, "calibration", tmp_path)
    assert again.fingerprint == a.fingerprint


def test_a_single_text_is_cut_in_the_middle(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("".join(documents()))
    one = SplitSpec(samples=1, sequence_length=4096)
    spec = small(name="a.txt", pack=False, calibration=one, evaluation=one)
    parts = [tokenizer.decode(own.ids[0]) for own in both_splits(spec, tokenizer, tmp_path)]
    assert "".join(parts) == "".join(documents())


def test_another_source_for_evaluation_is_used_whole(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("calibration text\n" * 50)
    (tmp_path / "b.txt").write_text("other words\n" * 50)
    spec = small(name="a.txt", evaluation_name="b.txt")
    a, b = both_splits(spec, tokenizer, tmp_path)
    assert "calibration" in tokenizer.decode(a.ids[0])
    assert "other" in tokenizer.decode(b.ids[0])
    assert b.source == "b.txt"


def test_padding_is_masked_and_leaves_no_trace(tokenizer, tmp_path):
    rows = [{"text": text * (i % 4 + 1)} for i, text in enumerate(documents())]
    write_rows(tmp_path / "d.jsonl", rows)
    spec = small(name="d.jsonl", pack=False, calibration=SplitSpec(samples=8, sequence_length=64))
    tokens = load_tokens(spec, tokenizer, "calibration", tmp_path)
    lengths = tokens.mask.sum(1)
    assert lengths.min() < lengths.max() == tokens.ids.shape[1] <= 64
    assert tokens.tokens == sum(len(ids) for ids in tokens.sequences()) == lengths.sum()
    wider = torch.nn.functional.pad(tokens.ids, (0, 9), value=7)
    mask = torch.nn.functional.pad(tokens.mask, (0, 9))
    assert type(tokens)(wider, mask, "s", "calibration").fingerprint == tokens.fingerprint


@pytest.mark.parametrize(
    ("template", "variables", "rendered"),
    [
        (ROLES, {}, "[user]hello"),
        (
            "{% for m in messages %}{{ mood }} {{ m.content }}{% endfor %}",
            {"mood": "kindly"},
            "kindly hello",
        ),
    ],
)
def test_chats_are_rendered_by_the_template(
    template, variables, rendered, tokenizer, tmp_path, monkeypatch
):
    answer = {"role": "assistant", "content": "x"}
    asked = [{"role": "user", "content": f"hello {i}"} for i in range(40)]
    write_rows(tmp_path / "c.jsonl", [{"messages": [own, answer]} for own in asked])
    spec = small(name="c.jsonl", messages_column="messages", chat_template_kwargs=variables)
    refused_recipe("no chat template", load_tokens, spec, tokenizer, "calibration", tmp_path)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    tokens = load_tokens(spec, tokenizer, "calibration", tmp_path)
    assert rendered in tokenizer.decode(tokens.ids.flatten())


def test_sharegpt_rows_give_the_tokens_of_their_messages(tokenizer, tmp_path, monkeypatch):
    import pandas as pd

    spoken = [(f"hello {i}", f"answer {i}") for i in range(40)]
    names = ("human", "gpt"), ("user", "assistant")
    sharegpt, messages = (
        [[{who: w, what: t} for w, t in zip(own, texts, strict=True)] for texts in spoken]
        for own, who, what in zip(names, ("from", "role"), ("value", "content"), strict=True)
    )
    write_rows(tmp_path / "s.jsonl", [{"conversations": chat} for chat in sharegpt])
    pd.DataFrame({"conversations": sharegpt}).to_parquet(tmp_path / "s.parquet")
    write_rows(tmp_path / "m.jsonl", [{"chat": chat} for chat in messages])
    columns = {"s.jsonl": "conversations", "s.parquet": "conversations", "m.jsonl": "chat"}
    monkeypatch.setattr(tokenizer, "chat_template", ROLES)
    found = {
        load_tokens(
            small(name=name, messages_column=column), tokenizer, "calibration", tmp_path
        ).fingerprint
        for name, column in columns.items()
    }
    assert len(found) == 1


CHAT = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"id": "x", "text": "hello"}, {"column": "text"}),
        ({"text": "rendered already", "messages": CHAT}, {"column": "text"}),
        ({"id": "x", "messages": CHAT}, {"messages_column": "messages"}),
        (
            {"conversations": [{"from": "human", "value": "x"}]},
            {"messages_column": "conversations"},
        ),
        ({"src": "a prompt", "tgt": "its answer"}, {"column": "src"}),
        ({"id": 5, "story": "once"}, {"column": "story"}),
        ({"id": "x", "Text": "hello"}, {"column": "Text"}),
        ({"sentence": "the only column"}, {"column": "sentence"}),
        ({"id": "x", "dialogue": CHAT}, {"messages_column": "dialogue"}),
        ({"id": "x", "turns": [{"from": "human", "value": "x"}]}, {"messages_column": "turns"}),
        ({"prompt": "a", "chosen": CHAT, "rejected": CHAT}, {"messages_column": "chosen"}),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_settings_are_guessed_from_the_first_row(tmp_path, row, settings, kind):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, table = tmp_path / f"data.{kind}", pa.Table.from_pylist([row, row])
    if kind == "jsonl":
        path.write_text("\n" + f"{json.dumps(row)}\n" * 2)
    elif kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "about.txt").write_text("words")
    assert guess_columns(path) == guess_columns(tmp_path) == settings


GREETED = {"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Hi"}


@pytest.mark.parametrize(
    ("rows", "column"),
    [
        ([{"conversations": GREETED, "id": 1}] * 2, "conversations"),  # chats by their name
        ([{"turns": GREETED, "id": 1}, {"turns": CHAT, "id": 2}], "turns"),  # by another row
        ([{"messages": json.dumps(CHAT)}], "messages"),  # no text, as all of a CSV is
        ([{"text": json.dumps(CHAT)}], "text"),
    ],
)
def test_chats_are_found_that_begin_with_an_answer_or_are_spelled_in_a_text(tmp_path, rows, column):
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert guess_columns(tmp_path / "d.jsonl") == {"messages_column": column}


@pytest.mark.parametrize("first", ["null", '{"dialogue": null}', '{"dialogue": []}'])
def test_settings_are_guessed_though_the_first_row_is_blank(tmp_path, first):
    (tmp_path / "d.jsonl").write_text(f"{first}\n" + json.dumps({"dialogue": CHAT}))
    assert guess_columns(tmp_path / "d.jsonl") == {"messages_column": "dialogue"}


def test_an_object_on_several_lines_is_a_row(tmp_path):
    (tmp_path / "d.json").write_text(json.dumps({"text": "a"}, indent=1))
    assert local_documents(tmp_path / "d.json", "text", plain_text) == ["a"]
    (tmp_path / "d.json").write_text(json.dumps({"rows": [{"text": "a"}]}, indent=1))
    refused_recipe(r"Found: rows \(list\)", guess_columns, tmp_path / "d.json")


def test_what_a_folder_is_read_for(tmp_path):
    """Tables before text, and JSON only where nothing else is: settings lie beside data."""
    for name, expected in (
        ("README.md", ["README.md"]),
        ("rows.json", ["rows.json"]),
        ("a.txt", ["README.md", "a.txt"]),
        ("b.csv", ["b.csv"]),
    ):
        text = "text\nb.csv\n" if name == "b.csv" else name
        (tmp_path / name).write_text('["rows.json"]' if name == "rows.json" else text)
        found = local_documents(tmp_path, "text", plain_text)
        assert found == expected


def test_what_of_a_folder_is_not_read_is_said(tokenizer, tmp_path):
    """Suffixes are read in whatever case."""
    write_rows(tmp_path / "a.JSONL", documents())
    for name in ("b.txt", "c.jsonl.gz", "license", ".hidden.txt"):
        (tmp_path / name).write_text("x")
    tokens = load_tokens(small(name=str(tmp_path)), tokenizer, "calibration")
    assert "of the folder are left out: b.txt, c.jsonl.gz" in tokens.notes


def test_files_of_text_have_no_columns(tmp_path):
    (tmp_path / "about.txt").write_text("words")
    assert guess_columns(tmp_path / "about.txt") == {}


def test_special_tokens_are_added_to_documents_but_not_to_chats(tiny_llama, tmp_path):
    """A rendered chat begins with the template's own special tokens; twice would be wrong."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.chat_template = "<|endoftext|>{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = [{"text": text, "messages": [{"role": "user", "content": text}]} for text in documents()]
    write_rows(tmp_path / "d.jsonl", rows)
    for values in ({}, {"messages_column": "messages"}):
        spec = small(name="d.jsonl", pack=False, **values)
        for ids in load_tokens(spec, tokenizer, "calibration", tmp_path).sequences():
            assert (ids == 0).nonzero().flatten().tolist() == [0]
    tokenizer.chat_template = None
    spec = small(name="d.jsonl", calibration=SplitSpec(samples=8, sequence_length=64))
    for ids in load_tokens(spec, tokenizer, "calibration", tmp_path).sequences():
        assert len(ids) == 64
        assert ids[0] == 0
        inside = (ids[1:] == 0).nonzero().flatten()
        assert len(inside) > 0
        assert (inside.diff() > 1).all()  # ends of documents alone


def test_a_name_that_datasets_reads(tokenizer, tmp_path, monkeypatch):
    """The hub's code path, on a folder that `datasets` itself loads."""
    from calibrate import data

    folder = tmp_path / "repository"
    folder.mkdir()
    for part, texts in (("train", documents()), ("test", documents(60))):
        write_rows(folder / f"{part}.jsonl", [{"content": text} for text in texts])
    assert named_documents(str(folder), None, "train", "content", plain_text) == documents()
    with pytest.raises(RecipeError, match="did you mean 'content'"):
        named_documents(str(folder), None, "train", "contents", plain_text)
    monkeypatch.setattr(
        data, "_read", lambda spec, source, part, *_: (documents(40 if part == "train" else 60), ())
    )
    spec = small(name="some/name", evaluation_split="test", pack=False)
    wide = spec.model_copy(update={"evaluation": SplitSpec(samples=20, sequence_length=64)})
    tokens = load_tokens(wide, tokenizer, "evaluation")
    numbers = {int(tokenizer.decode(ids).split("_")[1].split("(")[0]) for ids in tokens.sequences()}
    assert numbers == set(range(40, 60))  # those of train were left out


@pytest.mark.parametrize("count", [2, 3, 10])
def test_documents_are_divided_evenly_and_without_overlap(count):
    texts = [*documents(count), *documents(count), "  \n"]
    a, b = divided(texts, "calibration"), divided(texts, "evaluation")
    assert not set(a) & set(b)
    assert set(a) | set(b) == set(documents(count))
    assert abs(len(a) - len(b)) <= 2
    assert divided(texts[::-1], "calibration") == a[::-1]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("one two three four", "one two "),
        ("一二三四五六七八九十", "一二三四五"),  # no spaces, and a first half that is more than
        ("1. 一二三四五六七八九十一", "1. 一二三四"),  # what stands before the only one
    ],
)
def test_a_single_line_is_cut_at_a_space_near_its_middle(text, first):
    parts = [divided([text], split) for split in ("calibration", "evaluation")]
    assert parts == [[first], [text.removeprefix(first)]]


def test_documents_of_one_token_are_text(tokenizer, tmp_path):
    """Packed, they count like any other; each for itself they say nothing of a next token."""
    write_rows(tmp_path / "d.jsonl", [chr(ord("a") + i) for i in range(26)])
    assert load_tokens(small(name="d.jsonl", fewer=True), tokenizer, "calibration", tmp_path).tokens
    alone = small(name="d.jsonl", fewer=True, pack=False)
    refused_recipe("hold no text", load_tokens, alone, tokenizer, "calibration", tmp_path)


def test_that_one_document_serves_both_splits_is_said(tokenizer, tmp_path):
    for rows, said in ((["def f(): pass\n" * 40], True), (documents(2), False)):
        write_rows(tmp_path / "d.jsonl", rows)
        spec = DatasetSpec(name=str(tmp_path / "d.jsonl"), fewer=True)
        for split in ("calibration", "evaluation"):
            notes = load_tokens(spec, tokenizer, split).notes
            assert any("its first half calibrates" in note for note in notes) == said


def test_of_a_large_source_only_a_part_is_tokenized(tokenizer, tmp_path, monkeypatch):
    from calibrate import windows

    monkeypatch.setattr(windows, "FEWEST_CHARACTERS", 0)
    write_rows(tmp_path / "d.jsonl", [text * 20 for text in documents(400)])
    seen: list[int] = []

    class Counting(type(tokenizer)):
        def __call__(self, text, **options):
            seen.append(len(text))
            return super().__call__(text, **options)

    counting = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    counting.__class__ = Counting
    tokens = load_tokens(small(name="d.jsonl"), counting, "calibration", tmp_path)
    assert tokens.tokens == 48
    assert sum(seen) < 2 * 64 * 48
    other = small(name="d.jsonl", calibration=SMALL.model_copy(update={"seed": 1}))
    assert load_tokens(other, counting, "calibration", tmp_path).fingerprint != tokens.fingerprint


def test_a_folder_with_tables_is_not_read_for_its_readme(tokenizer, tmp_path):
    folder = tmp_path / "d"
    (folder / ".cache").mkdir(parents=True)
    (folder / ".cache" / "x.jsonl").write_text(json.dumps({"other": "x"}))
    (folder / "README.md").write_text("About the data.")
    write_rows(folder / "d.jsonl", documents())
    assert local_documents(folder, "text", plain_text) == documents()


def test_line_ends_and_byte_order_mark_and_separators_inside_strings(tmp_path):
    (tmp_path / "w.txt").write_bytes("\ufeffone\r\ntwo\r\n".encode())
    assert local_documents(tmp_path / "w.txt", "text", plain_text) == ["one\ntwo\n"]
    row = json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False)
    (tmp_path / "d.jsonl").write_text(f"{row}\r\n{row}", encoding="utf-8", newline="")
    assert local_documents(tmp_path / "d.jsonl", "text", plain_text) == ["a\u2028b\x85c"] * 2


def test_fewer_samples_do_where_that_is_said(tokenizer, tmp_path):
    write_rows(tmp_path / "d.jsonl", documents(8))
    spec = small(name="d.jsonl", calibration=SplitSpec(samples=1000, sequence_length=8))
    with pytest.raises(RecipeError, match=r"enough for \d+\. Lower .* set dataset\.fewer"):
        load_tokens(spec, tokenizer, "calibration", tmp_path)
    some = load_tokens(spec.model_copy(update={"fewer": True}), tokenizer, "calibration", tmp_path)
    assert 1 < len(some.ids) < 1000
    long = SplitSpec(samples=2, sequence_length=100_000)
    one = small(name="d.jsonl", calibration=long, fewer=True)
    tokens = load_tokens(one, tokenizer, "calibration", tmp_path)
    assert len(tokens.ids) == 1
    assert tokens.tokens >= some.tokens
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": ""}))
    refused_recipe("hold no text", load_tokens, one, tokenizer, "calibration", tmp_path)
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "h"}))
    with pytest.raises(RecipeError, match=r"a single one is divided in .* or give more text"):
        load_tokens(one, tokenizer, "calibration", tmp_path)
