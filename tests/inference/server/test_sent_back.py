"""What clients send back with a conversation, or beside it, that means nothing here, is taken."""

import pytest

from tests.inference.server.http_client import post
from tests.inference.server.tools.templates import HERMES

CHAT = "/v1/chat/completions"
HELLO = {"role": "user", "content": "hello"}
SAID = {"role": "assistant", "content": "Hi."}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GAVE = {"role": "tool", "content": "3", "tool_call_id": "c"}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def prompt(messages: list[dict], template: str = HERMES, **more) -> list[int]:
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True} | more
    response = post(CHAT, body, chat_template=template)
    assert response.status_code == 200, response.text
    return response.json()["prompt_token_ids"]


@pytest.mark.parametrize(
    "extra",
    [
        {"refusal": None, "audio": None, "function_call": None, "tool_calls": None},
        {"annotations": [{"type": "url_citation"}], "parsed": {"a": [1]}, "name": None},
        {"provider_specific_fields": {"refusal": None}, "thinking_blocks": [{"thinking": "Hm."}]},
        {"reasoning": "Hm.", "reasoning_details": [{"type": "reasoning.text"}], "images": []},
        {"reasoning": None, "reasoning_content": None, "prefix": False, **EPHEMERAL},
    ],
)
def test_an_answer_comes_back_with_what_libraries_put_on_it(extra):
    assert prompt([HELLO, SAID | extra, HELLO]) == prompt([HELLO, SAID, HELLO])


def test_calls_parts_and_tools_may_have_labels():
    plain = [HELLO, SAID | {"tool_calls": [CALL]}, GAVE]
    labels = {"provider_specific_fields": {"a": 1}, "extra_content": {"google": {}}}
    function = CALL["function"] | {"parsed_arguments": {}} | labels
    call = CALL | {"index": 0, "function": function} | labels
    part = {"type": "text", "text": "3"} | EPHEMERAL
    told = [HELLO | EPHEMERAL, SAID | {"tool_calls": [call]}, GAVE | {"content": [part]}]
    assert prompt(told) == prompt(plain)
    tool = {"type": "function", "function": {"name": "f"}}
    assert prompt(plain, tools=[tool | EPHEMERAL]) == prompt(plain, tools=[tool])


def test_thoughts_have_two_names():
    template = "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{% endfor %}"
    first = prompt([HELLO, SAID | {"reasoning_content": "Hm."}], template)
    assert prompt([HELLO, SAID | {"reasoning": "Hm."}], template) == first
    assert prompt([HELLO, SAID], template) != first


def test_the_output_of_responses_comes_back():
    said = {"type": "output_text", "text": "Hi.", "annotations": [{"type": "x"}], "parsed": None}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        HELLO,
        {"type": "message", "role": "assistant", "content": [said], "status": "completed"},
        call | {"parsed_arguments": {}},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    response = post("/v1/responses", {"input": items}, chat_template=HERMES)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_tokens": 5.0, "n": 2.0, "top_k": 4.0, "seed": 1.0, "metadata": {}}),
        (CHAT, {"max_completion_tokens": 5e0, "logprobs": True, "top_logprobs": 2.0}),
        ("/v1/completions", {"max_tokens": 5.0, "best_of": 1.0, "stop_token_ids": [3.0]}),
        ("/v1/completions", {"prompt": [65.0, 66], "min_tokens": 1.0, "logprobs": 0.0}),
        ("/v1/responses", {"max_output_tokens": 16.0}),
        ("/generate", {"max_new_tokens": 5.0, "top_k": 4.0}),
        ("/detokenize", {"tokens": [65.0]}),
    ],
)
def test_whole_numbers_may_have_a_point(path, fields):
    texts = {CHAT: {"messages": [HELLO]}, "/v1/responses": {"input": "a"}, "/detokenize": {}}
    body = texts.get(path, {"prompt": "a"}) | fields
    response = post(path, body)
    assert response.status_code == 200, response.text
    whole = {k: int(v) if isinstance(v, float) else v for k, v in body.items()}
    if path == CHAT:
        assert response.json()["usage"] == post(path, whole).json()["usage"]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"refusal": "I will not."}, "messages[1].refusal"),
        ({"prefix": True}, "messages[1].prefix"),
        ({"images": [{}]}, "messages[1].images"),
        ({"colour": "red"}, "messages[1].colour"),
        ({"role": "robot"}, "messages[1].role"),
        ({"role": "function", "name": "f"}, "messages[1].role"),
    ],
)
def test_what_has_a_meaning_that_is_not_kept_is_still_refused(extra, param):
    error = post(CHAT, {"messages": [HELLO, SAID | extra]}).json()["error"]
    assert error["param"] == param
    if "role" in extra:
        assert "allowed are system, developer, user, assistant, tool;" in error["message"]
