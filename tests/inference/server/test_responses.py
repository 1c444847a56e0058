"""`/v1/responses`: read as a chat, told as items and in events."""

import asyncio
import json
from functools import partial

import pytest

from inference.server.messages import Submit
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.http_client import ask as send
from tests.inference.server.http_client import post, talk, talking, tokenizer
from tests.inference.server.test_chat_tools import ADD, CALL, saying
from tests.inference.server.tools import templates

ROUTE = "/v1/responses"
TOOLS = [{"type": "function", **ADD}]


def ask(text: str, body: dict, template: str = templates.HERMES):
    return post(ROUTE, {"input": "1 + 2?"} | body, make=saying(text), chat_template=template)


def events(response) -> list[dict]:
    """The events of a stream, each under its own name and numbered."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *frames, rest = response.text.split("\n\n")
    assert rest == ""
    told = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        told.append(event)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


def shape(item: dict) -> dict:
    """An item without what chance made."""
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


TEXT = {"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}
MESSAGE = {"type": "message", "status": "completed", "role": "assistant", "content": [TEXT]}
CALLED = {"type": "function_call", "status": "completed", "name": "add", "arguments": '{"a": 1}'}


def test_an_answer_is_a_message_and_calls():
    response = ask("I add.\n" + CALL + CALL, {"tools": TOOLS, "metadata": {"k": "v"}})
    assert response.status_code == 200, response.text
    told = response.json()
    assert [shape(item) for item in told["output"]] == [MESSAGE, CALLED, CALLED]
    assert len({item["id"] for item in told["output"]}) == 3
    assert all(item["call_id"].startswith("call_") for item in told["output"][1:])
    assert (told["object"], told["status"], told["store"]) == ("response", "completed", False)
    assert (told["error"], told["incomplete_details"]) == (None, None)
    assert told["metadata"] == {"k": "v"}
    assert told["tools"] == TOOLS
    usage = told["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["output_tokens"] > 20


def test_a_stream_tells_it_in_order():
    told = events(ask("I add.\n" + CALL, {"tools": TOOLS, "stream": True}))
    kinds = [event["type"].removeprefix("response.") for event in told]
    deltas = ("output_text.delta", "function_call_arguments.delta")
    once = [k for i, k in enumerate(kinds) if not (k in deltas and kinds[i - 1] == k)]
    assert once == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    assert kinds.count(deltas[1]) > 1
    for kind, whole in zip(deltas, ("I add.", '{"a": 1}'), strict=True):
        pieces = [event for event in told if event["type"] == f"response.{kind}"]
        assert "".join(event["delta"] for event in pieces) == whole
    final = told[-1]["response"]
    assert [shape(item) for item in final["output"]] == [MESSAGE, CALLED]
    ids = [item["id"] for item in final["output"]]
    for event in told[2:-1]:
        assert event.get("item_id", event.get("item", {}).get("id")) == ids[event["output_index"]]
    begun = told[0]["response"]
    assert (begun["id"], begun["status"], begun["output"]) == (final["id"], "in_progress", [])
    added = [event["item"] for event in told if event["type"].endswith("item.added")]
    assert [item["status"] for item in added] == ["in_progress"] * 2
    assert (added[0]["content"], added[1]["arguments"]) == ([], "")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_is_incomplete(stream):
    def make():
        return FakeEngine(answer=lambda prompt, params: [65] * params.max_tokens)

    body = {"input": "x", "max_output_tokens": 3, "stream": stream}
    response = post(ROUTE, body, make=make)
    if stream:
        *_, last = events(response)
        assert last["type"] == "response.incomplete"
    told = last["response"] if stream else response.json()
    assert told["status"] == "incomplete"
    assert told["incomplete_details"] == {"reason": "max_output_tokens"}
    assert told["output"][0]["status"] == "incomplete"
    assert told["usage"]["output_tokens"] == 3


def test_an_empty_answer_is_an_empty_text():
    for stream in (False, True):
        response = ask("", {"stream": stream})
        told = events(response)[-1]["response"] if stream else response.json()
        assert told["output"][0]["content"] == [{**TEXT, "text": ""}]


@pytest.mark.anyio
async def test_a_failure_in_a_stream_is_its_last_event():
    async with talking(partial(FakeEngine, delay=0.01)) as (client, engine):
        answer = asyncio.create_task(client.post(ROUTE, json={"input": "x", "stream": True}))
        while engine.client.measures.generation_tokens < 3:
            await asyncio.sleep(0.001)
        engine.fail()
        last = events(await answer)[-1]["response"]
    assert (last["status"], last["error"]["code"]) == ("failed", "server_error")


def test_log_probabilities_are_told_where_they_are_asked_for():
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = ask("I add.\n" + CALL, {"tools": TOOLS} | body).json()["output"][0]["content"][0]
    assert "".join(token["token"] for token in whole["logprobs"]).startswith("I add.")
    told = events(ask("I add.\n" + CALL, {"tools": TOOLS, "stream": True} | body))
    pieces = [event for event in told if event["type"] == "response.output_text.delta"]
    [done] = [event for event in told if event["type"] == "response.output_text.done"]
    assert [token for event in pieces for token in event["logprobs"]] == done["logprobs"]


def sent(body: dict, template: str = templates.HERMES) -> Submit:
    """What the engine is asked."""

    async def scenario(client, engine):
        response = await client.post(ROUTE, json={"input": "1 + 2?"} | body)
        assert response.status_code == 200, response.text
        [submit] = [message for message in engine.sent if isinstance(message, Submit)]
        return submit

    return talk(scenario, saying("3"), chat_template=template)


PLAIN = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments.a }})"
    "{% endfor %}|{% endfor %}"
)


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"input": "hello"}, "user:hello|"),
        ({"input": "hello", "instructions": "Be kind."}, "system:Be kind.|user:hello|"),
        (
            {
                "input": [
                    {"role": "developer", "content": "d"},
                    {"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
                    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
                     "content": [{"type": "output_text", "text": "c", "annotations": []}]},
                    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
                    {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"a": 2}'},
                    {"type": "function_call_output", "call_id": "c1", "output": "x"},
                    {"type": "function_call_output", "call_id": "c2", "output": "y"},
                    {"type": "function_call", "call_id": "c3", "name": "f", "arguments": '{"a": 3}'},
                ]
            },
            "system:d|user:a\nb|assistant:c(c1 f 1)(c2 g 2)|tool:x|tool:y|assistant:(c3 f 3)|",
        ),
    ],
)  # fmt: skip
def test_what_is_asked_becomes_a_chat(body, prompt):
    assert tokenizer().decode(sent(body, PLAIN).prompt) == prompt


def test_what_is_asked_of_the_engine():
    body = {"temperature": 0.5, "top_p": 0.25, "max_output_tokens": 7}
    params = sent(body).params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.25, 7)
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    constraint = sent({"text": text}).params.constraint
    assert (constraint.kind, json.loads(constraint.text)) == ("json_schema", schema)
    assert (
        sent({"text": {"format": {"type": "json_object"}}}).params.constraint.kind == "json_object"
    )
    choice = {"type": "function", "name": "add"}
    for named in ("required", choice):
        constraint = sent({"tools": TOOLS, "tool_choice": named}).params.constraint
        assert constraint.kind == "structural_tag"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"store": True}, "store", "keeps no answers"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "send the whole conversation"),
        ({"background": True}, "background", "found True"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "no such control"),
        ({"include": ["file_search_call.results"]}, "include[0]", "logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search' is not supported"),
        ({"tools": [TOOLS[0]] * 2}, "tools", "two named 'add'"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "text only"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "assistant"),
        ({"input": "x" * 9000}, "input", "input: it has"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"top_logprobs": 3}, "top_logprobs", "include"),
        ({"max_tokens": 3}, "max_tokens", "no such field"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}, "size": 1}}, "text.size", "no such field"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused_by_name(body, param, message):
    response = ask("", body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


def test_fields_of_clients_that_ask_for_nothing_are_taken():
    body = {"store": False, "include": ["reasoning.encrypted_content"], "reasoning": None}
    body |= {"prompt_cache_key": "k", "client_metadata": {"a": "b"}, "service_tier": "auto"}
    assert ask("3", body).json()["output"][0]["content"][0]["text"] == "3"
    for effort in (None, "none"):
        assert ask("3", {"reasoning": {"effort": effort}}).status_code == 200


def test_a_stored_answer_is_nowhere():
    assert send("GET", ROUTE + "/resp_1").status_code == 404
