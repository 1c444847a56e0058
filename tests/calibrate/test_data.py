"""Every source, packing and padding, and which documents serve which split."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoTokenizer

from calibrate.data import STDLIB, DatasetSpec, SplitSpec, load_tokens
from formats.errors import RecipeError

SMALL = SplitSpec(samples=3, sequence_length=16)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


def small(**values) -> DatasetSpec:
    return DatasetSpec(**({"calibration": SMALL, "evaluation": SMALL} | values))


def documents(count=40) -> list[str]:
    return [f"def function_{i}(a, b):\n    return a * {i} + b\n" for i in range(count)]


def test_stdlib_splits_share_no_module(tokenizer):
    assert not set(STDLIB["calibration"]) & set(STDLIB["evaluation"])
    a, b = (load_tokens(small(), tokenizer, split) for split in ("calibration", "evaluation"))
    assert a.tokens == b.tokens == 48
    assert a.fingerprint != b.fingerprint
    assert a.fingerprint == load_tokens(small(), tokenizer, "calibration").fingerprint


def test_the_seed_chooses_the_windows(tokenizer):
    spec = small(calibration=SMALL.model_copy(update={"seed": 1}))
    first = load_tokens(small(), tokenizer, "calibration")
    assert load_tokens(spec, tokenizer, "calibration").fingerprint != first.fingerprint


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "folder"])
def test_local_files_give_the_same_tokens(tokenizer, tmp_path, kind):
    import pandas as pd
    import pyarrow as pa

    texts = documents()
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps({"text": t}) for t in texts) + "\n\n")
    elif kind == "parquet":
        pd.DataFrame({"text": texts}).to_parquet(path)
    elif kind == "arrow":
        table = pa.table({"text": texts})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        path.mkdir()
        for i, text in enumerate(texts):
            (path / f"{i:03d}.py").write_text(text)
    spec = small(name=path.name)
    a, b = (
        load_tokens(spec, tokenizer, split, tmp_path) for split in ("calibration", "evaluation")
    )
    assert a.tokens == b.tokens == 48
    reference = tmp_path / "reference.jsonl"
    reference.write_text("\n".join(json.dumps({"text": t}) for t in texts))
    again = load_tokens(small(name="reference.jsonl"), tokenizer, "calibration", tmp_path)
    assert again.fingerprint == a.fingerprint


def test_a_single_text_is_cut_in_the_middle(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("".join(documents()))
    spec = small(
        name="a.txt",
        pack=False,
        calibration=SplitSpec(samples=1, sequence_length=4096),
        evaluation=SplitSpec(samples=1, sequence_length=4096),
    )
    parts = [
        tokenizer.decode(load_tokens(spec, tokenizer, split, tmp_path).ids[0])
        for split in ("calibration", "evaluation")
    ]
    assert "".join(parts) == "".join(documents())


def test_another_source_for_evaluation_is_used_whole(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("calibration text\n" * 50)
    (tmp_path / "b.txt").write_text("other words\n" * 50)
    spec = small(name="a.txt", evaluation_name="b.txt")
    a, b = (
        load_tokens(spec, tokenizer, split, tmp_path) for split in ("calibration", "evaluation")
    )
    assert "calibration" in tokenizer.decode(a.ids[0])
    assert "other" in tokenizer.decode(b.ids[0])
    assert b.source == "b.txt"


def test_padding_is_masked_and_leaves_no_trace(tokenizer, tmp_path):
    rows = [{"text": text * (i % 4 + 1)} for i, text in enumerate(documents())]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = small(name="d.jsonl", pack=False, calibration=SplitSpec(samples=8, sequence_length=64))
    tokens = load_tokens(spec, tokenizer, "calibration", tmp_path)
    lengths = tokens.mask.sum(1)
    assert lengths.min() < lengths.max() == tokens.ids.shape[1] <= 64
    assert tokens.tokens == sum(len(ids) for ids in tokens.sequences()) == lengths.sum()
    wider = torch.nn.functional.pad(tokens.ids, (0, 9), value=7)
    mask = torch.nn.functional.pad(tokens.mask, (0, 9))
    assert type(tokens)(wider, mask, "s", "calibration").fingerprint == tokens.fingerprint


def test_chats_are_rendered_by_the_template(tokenizer, tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"hello {i}"},
                {"role": "assistant", "content": "x"},
            ]
        }
        for i in range(40)
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = small(name="c.jsonl", messages_column="messages")
    with pytest.raises(RecipeError, match="no chat template"):
        load_tokens(spec, tokenizer, "calibration", tmp_path)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    try:
        tokens = load_tokens(spec, tokenizer, "calibration", tmp_path)
    finally:
        tokenizer.chat_template = None
    assert "[user]hello" in tokenizer.decode(tokens.ids.flatten())


def test_a_name_that_datasets_reads(tokenizer, tmp_path):
    """The hub's code path, on a folder that `datasets` itself loads."""
    from calibrate import data

    folder = tmp_path / "repository"
    folder.mkdir()
    rows = "\n".join(json.dumps({"content": text}) for text in documents())
    (folder / "train.jsonl").write_text(rows)
    spec = small(name=str(folder), column="content")
    texts = data._named_documents(spec, str(folder), "calibration", tokenizer)
    assert texts == documents()
