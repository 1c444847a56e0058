"""`/v1/chat/completions` with tools: told to the template, called, and answered."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

from inference.server.messages import Submit
from tests.inference.server.fake_engine import INFO, FakeEngine
from tests.inference.server.http_client import events, post, settings, talk, talking, tokenizer
from tests.inference.server.tools import templates

HELLO = [{"role": "user", "content": "1 + 2?"}]
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}, {"type": "function", "function": {"name": "find"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ROUTE = "/v1/chat/completions"


def saying(text: str) -> partial[FakeEngine]:
    """An engine that gives a text to every request, and ends."""
    tokens = [*tokenizer()(text, add_special_tokens=False)["input_ids"], 0]
    info = replace(INFO, max_model_len=4096)
    return partial(FakeEngine, answer=lambda *_: tokens, info=info)


def ask(text: str, body: dict, template: str = templates.HERMES):
    body = {"messages": HELLO, "tools": TOOLS} | body
    return post(ROUTE, body, make=saying(text), chat_template=template)


@pytest.mark.parametrize(
    ("template", "answer", "content", "calls"),
    [
        (templates.HERMES, "I add.\n" + CALL, "I add.", [("add", '{"a": 1}')]),
        (templates.HERMES, CALL + "\n" + CALL, None, [("add", '{"a": 1}')] * 2),
        (templates.LLAMA3, '{"name": "find", "parameters": {}}', None, [("find", "{}")]),
    ],
)
def test_calls_are_told_whole_and_in_parts(template, answer, content, calls):
    response = ask(answer, {}, template)
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == content
    told = [
        (c["type"], c["function"]["name"], c["function"]["arguments"])
        for c in message["tool_calls"]
    ]
    assert told == [("function", *call) for call in calls]
    assert len({call["id"] for call in message["tool_calls"]}) == len(calls)

    chunks = [c["choices"][0] for c in events(ask(answer, {"stream": True}, template))]
    assert chunks[-1]["finish_reason"] == "tool_calls"
    assert all(chunk["finish_reason"] is None for chunk in chunks[:-1])
    assert "".join(c["delta"].get("content") or "" for c in chunks) == (content or "")
    gathered: dict[int, dict] = {}
    for piece in [piece for c in chunks for piece in c["delta"].get("tool_calls", [])]:
        if "id" in piece:
            assert piece["index"] == len(gathered)
            assert (piece["type"], piece["function"]["arguments"]) == ("function", "")
            gathered[piece["index"]] = {"name": piece["function"]["name"], "arguments": ""}
        else:
            assert set(piece["function"]) == {"arguments"}
            gathered[piece["index"]]["arguments"] += piece["function"]["arguments"]
    assert [tuple(call.values()) for call in gathered.values()] == calls


def test_without_calls_the_answer_is_text():
    text = 'No <tool_call>{"name": "sub", "arguments": {}}</tool_call>.'
    [choice] = ask(text, {}).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}


def test_tools_that_must_not_be_called_are_not_told_of():
    response = ask(CALL, {"tool_choice": "none", "return_token_ids": True}).json()
    assert response["choices"][0]["message"]["content"] == CALL
    assert "Functions" not in tokenizer().decode(response["prompt_token_ids"])


def test_log_probabilities_come_with_calls():
    body = {"logprobs": True, "top_logprobs": 1}
    [choice] = ask(CALL, body).json()["choices"]
    assert "".join(t["token"] for t in choice["logprobs"]["content"]).startswith(CALL)
    chunks = events(ask(CALL, body | {"stream": True}))
    entries = [c["choices"][0]["logprobs"] for c in chunks]
    told = [token["token"] for entry in entries if entry for token in entry["content"]]
    assert told == [t["token"] for t in choice["logprobs"]["content"]]


@pytest.mark.parametrize("tokens_less", [1, 2, 3])
def test_a_call_whose_end_is_cut_by_the_limit_is_a_call_without_any_text(tokens_less):
    tokens = tokenizer()(CALL, add_special_tokens=False)["input_ids"]
    left = tokenizer().decode(tokens[:-tokens_less])
    assert CALL[:-12] in left
    assert left != CALL
    body = {"max_tokens": len(tokens) - tokens_less}
    [choice] = ask(CALL, body).json()["choices"]
    assert choice["finish_reason"] == "length"  # as OpenAI: what would have followed is unknown
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": '{"a": 1}',
    }
    chunks = [c["choices"][0] for c in events(ask(CALL, body | {"stream": True}))]
    assert not any(chunk["delta"].get("content") for chunk in chunks)
    assert chunks[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "one",
    [
        {"parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
    ],
)
@pytest.mark.anyio
async def test_where_one_call_is_wanted_the_engine_is_stopped_behind_it(stream, one):
    body = {"messages": HELLO, "tools": TOOLS, "stream": stream, **one}
    make = saying(CALL + "\n" + CALL * 20)
    async with talking(make, chat_template=templates.HERMES) as (client, engine):
        response = await client.post(ROUTE, json=body)
        assert response.text.count('"add"') == 1
        assert '"finish_reason":"tool_calls"' in response.text
        assert len(engine.aborted) == 1
        assert not engine.running


def sent(body: dict):
    """What the engine is asked."""

    async def scenario(client, engine):
        response = await client.post(ROUTE, json={"messages": HELLO, "tools": TOOLS} | body)
        assert response.status_code == 200, response.text
        [submit] = [message for message in engine.sent if isinstance(message, Submit)]
        return submit

    return talk(scenario, saying(CALL), chat_template=templates.HERMES)


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["add", "find"]), ({"type": "function", "function": {"name": "find"}}, ["find"])],
)
def test_a_required_call_is_constrained(choice, names):
    constraint = sent({"tool_choice": choice}).params.constraint
    tags = json.loads(constraint.text)["format"]["tags"]
    assert [tag["begin"] for tag in tags] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in names
    ]


def test_a_free_choice_beside_a_response_format_is_a_call_or_the_format():
    assert sent({}).params.constraint is None
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    made = json.loads(sent({"response_format": wanted}).params.constraint.text)["format"]
    assert made["type"] == "or"
    assert made["elements"][1]["json_schema"] == schema
    made = json.loads(sent({"response_format": {"type": "json_object"}}).params.constraint.text)
    assert made["format"]["elements"][1]["json_schema"] == {"type": "object"}


def test_calls_and_their_answers_reach_the_template_as_it_wants_them():
    def call(name, arguments):
        return {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}

    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call("c1", '{"a": [1]}')]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "assistant", "content": "3", "tool_calls": []},
        {"role": "assistant", "tool_calls": [call("c2", "a + b")]},
    ]
    prompt = tokenizer().decode(sent({"messages": messages}).prompt)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": [1]}}\n</tool_call>' in prompt
    assert '"arguments": "a + b"' in prompt
    assert "None" not in prompt
    named = "{% for m in messages %}{{ m.name }}{{ 'tool_calls' in m }} {% endfor %}"
    response = post(
        ROUTE,
        {"messages": messages, "max_tokens": 1, "return_token_ids": True},
        make=partial(FakeEngine),
        chat_template=named,
    )
    prompt = tokenizer().decode(response.json()["prompt_token_ids"])
    assert prompt == "False True addFalse False True "


@pytest.mark.parametrize(
    ("body", "template", "param", "message"),
    [
        ({}, templates.PLAIN, "tools", "the model's chat template knows none"),
        ({}, templates.CODER, "tools", "--tool-format"),
        ({"tool_choice": "always"}, templates.HERMES, "tool_choice", "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, templates.HERMES, "tool_choice", "no tools"),
        ({"tools": [TOOLS[0]] * 129}, templates.HERMES, "tools", "at most 128"),
        ({"tools": [{"type": "web_search"}]}, templates.HERMES, "tools[0].type", "web_search"),
        ({"tool_choice": "required", "beam_width": 2}, templates.HERMES, "tools", "beam_width"),
        ({"functions": [ADD]}, templates.HERMES, "functions", "use tools"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_by_name(body, template, param, message):
    response = ask("", body, template)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


def test_the_format_may_be_set():
    assert settings(tool_format="hermes").tool_format == "hermes"
    response = post(
        ROUTE,
        {"messages": HELLO, "tools": TOOLS},
        make=saying(CALL),
        chat_template=templates.CODER,
        tool_format="hermes",
    )
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"


def test_tokens_of_a_chat_with_tools_are_those_of_its_prompt():
    body = {"messages": HELLO, "tools": TOOLS}
    told = post("/tokenize", body, make=saying(""), chat_template=templates.HERMES).json()
    assert told["tokens"] == list(sent({}).prompt)
    plain = post("/tokenize", {"messages": HELLO}, make=saying(""), chat_template=templates.HERMES)
    assert plain.json()["count"] < told["count"]
    refused = post("/tokenize", {"prompt": "x", "tools": TOOLS}, make=saying(""))
    assert "tools belong to messages" in refused.json()["error"]["message"]
