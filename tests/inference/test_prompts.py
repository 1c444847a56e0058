"""Chat templates: how they make a prompt, where there is none, and what they refuse."""

import shutil
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from formats.command import run_command
from inference import predict
from inference.engine import Engine
from inference.prompts import PromptFormat
from inference.requests.request import SamplingParams
from tests.inference.predicting import SHORT, answered

CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(tiny_llama, tmp_path_factory) -> Path:
    return with_template(tiny_llama, tmp_path_factory.mktemp("chat") / "model", CHAT)


def with_template(model: Path, folder: Path, template: str) -> Path:
    """A copy of a model with a chat template, and a tokenizer that begins texts with BOS."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "prompt", "note"),
    [
        ([], "<|endoftext|><user>hi<assistant>", "go through the model's chat template; --raw"),
        (["--system", "s"], "<|endoftext|><system>s<user>hi<assistant>", "chat template"),
        (["--raw"], "<|endoftext|>hi", "completed as they stand"),
    ],
)
def test_the_chat_template_makes_the_prompt(chat_model, capsys, options, prompt, note):
    """However it is made, one BOS token begins it."""
    engine = Engine.from_pretrained(chat_model)
    ids = engine.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert ids.count(0) == 1
    want = engine.generate([ids], SamplingParams(max_tokens=6))[0].text
    assert predict.main([str(chat_model), "--prompt", "hi", *SHORT, *options]) == 0
    captured = capsys.readouterr()
    assert captured.out == want + "\n"
    assert captured.err.count("note: ") == 1
    assert note in captured.err


def test_text_that_a_template_has_rendered_gets_no_second_bos(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    prompts = PromptFormat.of(tokenizer, raw=True)
    rendered = "<|endoftext|><user>hi<assistant>"
    assert prompts.tokens(rendered) == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert prompts.tokens("hi") == [0, *prompts.continuation_tokens("hi")]
    assert prompts.continuation_tokens(rendered) == prompts.tokens(rendered)
    engine, ids = Engine.from_pretrained(chat_model), prompts.tokens(rendered)
    given = engine.generate([rendered, "hi"], SamplingParams(max_tokens=1))
    assert [list(o.prompt_token_ids) for o in given] == [ids, prompts.tokens("hi")]


def test_without_a_template_the_note_says_so(model, capsys):
    assert predict.main([str(model), "--prompt", "hi", *SHORT]) == 0
    assert "note: the model has no chat template" in capsys.readouterr().err
    assert run_command(predict.main, [str(model), "--prompt", "hi", "--system", "s"]) == 2
    assert "a system message needs the model's chat template" in capsys.readouterr().err


def test_rows_of_messages(chat_model, tmp_path):
    prompts = PromptFormat.of(AutoTokenizer.from_pretrained(chat_model), system="s")
    hi, own = {"role": "user", "content": "hi"}, {"role": "system", "content": "own"}
    texts = [
        prompts.tokenizer.decode(prompts.tokens(messages))
        for messages in ("hi", [hi], [own, hi], [hi, {"role": "assistant", "content": "a"}, hi])
    ]
    assert texts[0] == texts[1] == "<|endoftext|><system>s<user>hi<assistant>"
    assert texts[2] == "<|endoftext|><system>own<user>hi<assistant>"
    assert texts[3] == "<|endoftext|><system>s<user>hi<assistant>a<user>hi<assistant>"
    given = [
        {"src": "hi", "tgt": "x"},
        {"messages": [hi], "tgt": "x"},
        {"messages": [{"from": "human", "value": "hi"}], "tgt": "x"},
    ]
    found = answered(chat_model, tmp_path, *given, options=["--system", "s"])
    assert [next(iter(row)) for row in found] == ["src", "messages", "messages"]
    assert len({(row["output"], row["logprob"], row["tgt_tokens"]) for row in found}) == 1


def test_a_template_that_refuses_is_one_error(tiny_llama, tmp_path, capsys):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}"
    model = with_template(tiny_llama, tmp_path / "model", f"{refusing}{{% endif %}}x")
    arguments = [str(model), "--prompt", "hi", "--system", "s"]
    assert run_command(predict.main, arguments) == 2
    error = capsys.readouterr().err
    assert "error: messages (system, user): the chat template cannot render it (no system" in error
    assert "`ptq predict --raw`" in error
