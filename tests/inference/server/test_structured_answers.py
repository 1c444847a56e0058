"""What a real server is asked to write, a random model writes: JSON of a schema, calls of tools."""

import json
from collections.abc import Iterator

import httpx
import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}
NAMED = {"name": "pet", "schema": SCHEMA, "strict": True}
FORMAT = {"type": "json_schema", "json_schema": NAMED}
HELLO = [{"role": "user", "content": "A pet?"}]
TOOLS = [{"type": "function", "function": {"name": "keep", "parameters": SCHEMA}}]
SEEDS = range(3)


@pytest.fixture(scope="module")
def client(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.address, timeout=60) as made:
        yield made


def check(text: str) -> None:
    """A text is JSON, valid under the schema."""
    value = json.loads(text)
    assert set(value) == {"name", "kind", "tags"}
    assert len(value["name"]) <= 8
    assert value["kind"] in ("cat", "dog")
    assert 1 <= len(value["tags"]) <= 2
    assert all(isinstance(tag, bool) for tag in value["tags"])


def post(client: httpx.Client, path: str, body: dict) -> dict:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_follow_a_schema(client, seed):
    asked = {"seed": seed, "response_format": FORMAT}
    told = post(client, "/v1/chat/completions", asked | {"messages": HELLO})
    assert told["choices"][0]["finish_reason"] == "stop"
    check(told["choices"][0]["message"]["content"])
    told = post(client, "/v1/completions", asked | {"prompt": "A pet:", "max_tokens": 300})
    check(told["choices"][0]["text"])
    text = {"format": {"type": "json_schema", **NAMED}}
    told = post(client, "/v1/responses", {"input": "A pet?", "text": text})
    check(told["output"][0]["content"][0]["text"])


def test_an_answer_is_an_object_where_one_is_asked_for(client):
    body = {"messages": HELLO, "response_format": {"type": "json_object"}, "seed": 1}
    [choice] = post(client, "/v1/chat/completions", body)["choices"]
    if choice["finish_reason"] == "stop":  # a random model may never end it
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert choice["message"]["content"].lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "keep"}}])
def test_calls_that_are_required_are_made(client, choice):
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    for seed in SEEDS:
        [told] = post(client, "/v1/chat/completions", body | {"seed": seed})["choices"]
        assert told["finish_reason"] == "tool_calls", told
        assert told["message"]["content"] is None
        [call] = told["message"]["tool_calls"]
        assert call["function"]["name"] == "keep"
        check(call["function"]["arguments"])


def test_a_call_in_a_response_is_made_and_answered(client):
    tools = [{"type": "function", "name": "keep", "parameters": SCHEMA}]
    body = {"input": "A pet?", "tools": tools, "tool_choice": "required"}
    told = post(client, "/v1/responses", body | {"parallel_tool_calls": False})
    [call] = told["output"]
    assert call["type"] == "function_call"
    check(call["arguments"])
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "kept"}
    items = [{"role": "user", "content": "A pet?"}, call, output]
    told = post(client, "/v1/responses", {"input": items, "max_output_tokens": 4})
    assert told["output"][0]["type"] == "message"


def test_a_schema_that_cannot_be_compiled_is_refused_by_name(client):
    schema = {"type": "object", "properties": {"x": {"type": "no such type"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": HELLO, "response_format": wanted}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "response_format"
    function = {"name": "keep", "parameters": schema, "strict": True}
    tool = {"type": "function", "function": function}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": "required"}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "tools"
