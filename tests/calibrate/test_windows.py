"""Every sequence begins as a prompt does that the model is served: one BOS, the template's own."""

from __future__ import annotations

import json

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from calibrate.data import load_tokens
from calibrate.spec import DatasetSpec, SourceSpec, SplitSpec
from formats.chat_tokens import ChatEncoder

BOS, TURN = "<|bos|>", "<|turn|>"
TEMPLATE = (
    BOS + "{% for m in messages %}" + TURN + "{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}" + TURN + "assistant\n{% endif %}"
)
AMOUNT = SplitSpec(samples=6, sequence_length=200)


@pytest.fixture
def tokenizer(tiny_llama):
    """One that puts BOS before a text, with tokens of a chat template that it does not have yet."""
    made = AutoTokenizer.from_pretrained(tiny_llama)
    made.add_special_tokens({"bos_token": BOS})
    made.add_tokens([TURN], special_tokens=True)
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, made.bos_token_id)]
    )
    return made


def write(folder, rows, name="d.jsonl") -> DatasetSpec:
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return DatasetSpec(name=name, calibration=AMOUNT, evaluation=AMOUNT)


def prose(count=240) -> list[dict[str, str]]:
    return [
        {"text": f"Text {i} tells of {i} things.\nAnd of {i + 1} others. " * 4}
        for i in range(count)
    ]


def chats(count=240) -> list[dict[str, list[dict[str, str]]]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {i}?"},
                {"role": "assistant", "content": f"{i} is a number. " * (1 + i % 4)},
            ]
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("split", ["calibration", "evaluation"])
def test_bos_stands_before_each_window_of_text_and_nowhere_else(tokenizer, tmp_path, split):
    tokens = load_tokens(write(tmp_path, prose()), tokenizer, split, tmp_path)
    assert tokens.ids.shape == (6, 200)
    assert [ids.tolist().count(tokenizer.bos_token_id) for ids in tokens.ids] == [1] * 6
    assert (tokens.ids[:, 0] == tokenizer.bos_token_id).all()


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("made_of", [chats, prose])
def test_control_tokens_that_a_message_spells_are_text_as_served(
    tokenizer, tmp_path, pack, made_of
):
    """Of a chat, and of text that is made a chat, each turn's token is the template's."""
    tokenizer.chat_template, rows = TEMPLATE, made_of()
    for row in rows:
        texts = row.get("messages", [row])
        key = "content" if made_of is chats else "text"
        texts[0][key] = texts[0][key].replace(" ", f" {TURN}", 1)
    column = "messages" if made_of is chats else None
    spec = write(tmp_path, rows).model_copy(update={"messages_column": column, "pack": pack})
    spec = spec.model_copy(update={"in_template": 1.0})
    tokens = load_tokens(spec, tokenizer, "calibration", tmp_path)
    turn = tokenizer.convert_tokens_to_ids(TURN)
    served = ChatEncoder(tokenizer).tokens(chats()[0]["messages"])
    assert served.count(turn) == 2
    for ids in tokens.sequences():
        text = tokenizer.decode(ids)
        written = text.count(TURN) - text.count(f" {TURN}")
        assert (ids == turn).sum() == written < text.count(TURN)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("brought", ["messages", "text"])
def test_a_window_of_chats_begins_with_one(tokenizer, tmp_path, pack, brought):
    """Rendered here or before, they are not begun within, and BOS is not doubled."""
    tokenizer.chat_template, rows, column = TEMPLATE, chats(), "messages"
    if brought == "text":
        rows = [
            {"text": tokenizer.apply_chat_template(r["messages"], tokenize=False)} for r in rows
        ]
        column = None
    spec = write(tmp_path, rows).model_copy(update={"messages_column": column, "pack": pack})
    tokens = load_tokens(spec, tokenizer, "calibration", tmp_path)
    texts = [tokenizer.decode(ids) for ids in tokens.sequences()]
    assert all(text.startswith(f"{BOS}{TURN}user\nWhat is ") for text in texts)
    assert all(text.count(BOS) == 1 for text in texts)
    assert all(text.count(f"{TURN}user") > 1 for text in texts) == pack
    assert (tokens.kind, tokens.warning) == ("chat", "")


def test_what_a_window_is_follows_from_content_and_seed(tokenizer, tmp_path):
    tokenizer.chat_template = TEMPLATE
    spec = write(tmp_path, prose())
    first, again = (load_tokens(spec, tokenizer, "calibration", tmp_path) for _ in range(2))
    other = spec.model_copy(update={"calibration": AMOUNT.model_copy(update={"seed": 1})})
    assert first.fingerprint == again.fingerprint
    assert load_tokens(other, tokenizer, "calibration", tmp_path).fingerprint != first.fingerprint


def test_of_text_a_share_is_put_in_the_template(tokenizer, tmp_path):
    """The model is served through it, and the run says that its data are no chats."""
    spec = write(tmp_path, prose())
    assert (
        load_tokens(spec, tokenizer, "calibration", tmp_path).warning == ""
    )  # none to be served by
    tokenizer.chat_template = TEMPLATE
    tokens = load_tokens(spec, tokenizer, "calibration", tmp_path)
    texts = [tokenizer.decode(ids) for ids in tokens.sequences()]
    rendered = [text for text in texts if text.startswith(f"{BOS}{TURN}user\n")]
    assert len(rendered) == round(6 * spec.in_template)
    assert all(f"{TURN}assistant\n" in text for text in rendered)
    assert "2 of 6 sequences hold their text as chats" in tokens.warning
    assert "dataset.messages_column" in tokens.warning
    assert tokens.ids.shape == (6, 200)
    off = spec.model_copy(update={"in_template": 0.0})
    plain = load_tokens(off, tokenizer, "calibration", tmp_path)
    assert TURN not in tokenizer.decode(plain.ids.flatten())
    assert "none of the template's tokens" in plain.warning
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    assert "never" in load_tokens(spec, tokenizer, "calibration", tmp_path).warning
    assert load_tokens(spec, tokenizer, "evaluation", tmp_path).also is None


def test_text_is_measured_in_the_template_as_well(tokenizer, tmp_path):
    spec = write(tmp_path, prose())
    assert load_tokens(spec, tokenizer, "evaluation", tmp_path).also is None
    tokenizer.chat_template = TEMPLATE
    evaluation = load_tokens(spec, tokenizer, "evaluation", tmp_path)
    other = evaluation.also
    assert other is not None
    assert (evaluation.kind, other.kind, len(other.ids)) == ("prose", "chat", 6)
    assert "in the chat template" in other.source
    calibrated = tokenizer.decode(
        load_tokens(spec, tokenizer, "calibration", tmp_path).ids.flatten()
    )
    for text in map(tokenizer.decode, other.sequences()):
        assert text.startswith(f"{BOS}{TURN}user\n")
        for line in filter(lambda line: line.startswith("Text "), text.split("\n")[:-2]):
            assert line not in calibrated  # no document serves both


def test_another_source_is_measured_as_well(tokenizer, tmp_path):
    tokenizer.chat_template = TEMPLATE
    spec = write(tmp_path, chats()).model_copy(update={"messages_column": "messages"})
    write(tmp_path, prose(), "prose.jsonl")
    assert load_tokens(spec, tokenizer, "evaluation", tmp_path).also is None
    named = spec.model_copy(update={"also": SourceSpec(name="prose.jsonl")})
    evaluation = load_tokens(named, tokenizer, "evaluation", tmp_path)
    other = evaluation.also
    assert other is not None
    assert (evaluation.kind, other.kind, other.source) == ("chat", "prose", "prose.jsonl")
    assert "Text 1" in tokenizer.decode(other.ids.flatten())


@pytest.mark.parametrize("pack", [True, False])
def test_blank_rows_are_skipped_and_counted(tokenizer, tmp_path, pack):
    """Null, an empty chat, and no text: a run does not end for them."""
    tokenizer.chat_template = TEMPLATE
    rows = [None, {"text": None, "messages": None}, {"text": " ", "messages": []}]
    both = [{**text, **chat} for text, chat in zip(prose(), chats(), strict=True)]
    for column in (None, "messages"):
        spec = write(tmp_path, [*rows, *both])
        spec = spec.model_copy(update={"messages_column": column, "pack": pack})
        tokens = load_tokens(spec, tokenizer, "calibration", tmp_path)
        assert "3 of 243 documents are blank, null or empty chats: left out" in tokens.notes
        clean = write(tmp_path, both, "clean.jsonl")
        clean = clean.model_copy(update={"messages_column": column, "pack": pack})
        found = load_tokens(clean, tokenizer, "calibration", tmp_path)
        assert tokens.fingerprint == found.fingerprint
        assert found.notes == (
            f"{'chats' if column else 'text'} of the column {column or 'text'!r}",
        )
