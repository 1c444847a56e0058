"""Chats in both spellings, and what a template refuses."""

import json
import re

import pytest
from transformers import AutoTokenizer

from formats.chat_template import (
    brings_chat_template,
    check_chat_template,
    has_chat_template,
    read_messages,
    render_chat,
)

HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


def test_sharegpt_becomes_roles_and_content():
    chat = [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "Hello"},
        {"from": "gpt", "value": "Hi"},
        {"from": "observation", "value": "12"},
    ]
    roles = ["system", "user", "assistant", "tool"]
    found = read_messages(chat)
    assert [message["role"] for message in found] == roles
    assert [message["content"] for message in found] == [message["value"] for message in chat]


def test_messages_are_made_what_a_served_chat_is():
    """Templates meet nulls, parts and calls as JSON in neither, nor names of others' speakers."""
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = [
        {
            "role": "human",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
        {"role": "tool", "content": "2", "tool_call_id": "1", "tool_calls": None},
        {"role": "assistant", "tool_calls": [{"name": "f"}]},
    ]
    called = {"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
    made = [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
    ]
    assert read_messages(chat) == read_messages(json.dumps(chat)) == made
    assert read_messages(HELLO) == HELLO


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ("Hello", "found str; a chat is a list of messages"),
        ([], "found []"),
        (None, "found None"),
        ([HELLO[0], "Hi"], "message 2 is Hi; a message is"),
        ([{"role": "user", "value": "Hello"}], "message 1 is"),
        ([{"from": "human"}], '{"from": "human", "value": text}'),
        ([{"from": "narrator", "value": "x"}], "known speakers: system, human, "),
    ],
)
def test_what_is_no_chat_is_told_with_what_is_one(chat, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        read_messages(chat)


def test_a_chat_is_rendered_up_to_the_answer(tokenizer):
    assert not has_chat_template(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{{ mood }}{% endif %}"
    )
    assert has_chat_template(tokenizer)
    assert render_chat(tokenizer, HELLO) == "[user]Hello[assistant]Hi"
    text = render_chat(tokenizer, HELLO[:1], {"mood": "kindly"}, answer=True)
    assert text == "[user]Hello[assistant]kindly"


def test_a_folder_that_brings_a_template_is_known_without_loading_it(tokenizer, tmp_path):
    assert not brings_chat_template(tmp_path)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert not brings_chat_template(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"chat_template": "{{ messages }}"}')
    assert brings_chat_template(tmp_path)
    settings.write_text("damaged")
    assert not brings_chat_template(tmp_path)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    assert brings_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content / 0 }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].tools.name.first }}", "no attribute 'tools'"),
        ({"tool_use": "x"}, "multiple chat templates with no default"),
    ],
)
def test_a_template_that_fails_is_a_refusal(tokenizer, template, words):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="the chat template cannot render it") as caught:
        render_chat(tokenizer, HELLO)
    assert words in str(caught.value)


def test_a_template_that_cannot_be_read_is_told_apart_from_one_that_refuses(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no users') }}"
    check_chat_template(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}\n{{ m. }}{% endfor %}"
    with pytest.raises(ValueError, match="line 2 of the chat template: "):
        check_chat_template(tokenizer)
