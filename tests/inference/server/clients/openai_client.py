"""What OpenAI's own library sees of a server; run by `test_clients` in an environment of its own.

PTQ_URL is the server's address, PTQ_KEY its key, PTQ_BUSY_URL the address of another without a key,
which runs one request and lets none wait.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

URL, KEY, BUSY = os.environ["PTQ_URL"], os.environ["PTQ_KEY"], os.environ["PTQ_BUSY_URL"]
HELLO = [{"role": "user", "content": "A pet?"}]


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    tame: bool
    name: str = Field(max_length=4)


SCHEMA = Pet.model_json_schema() | {"additionalProperties": False}
FUNCTION = {"name": "keep", "description": "Keep a pet.", "parameters": SCHEMA, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.fixture(scope="module")
def client():
    with OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def ask(client, **values):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": HELLO, "max_completion_tokens": 8, "seed": 1} | values
    )


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_chat_whole_and_streamed(client):
    whole = ask(client)
    assert whole.object == "chat.completion"
    [choice] = whole.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert whole.usage.completion_tokens == 8
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    *parts, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in parts) == choice.message.content
    assert parts[-1].choices[0].finish_reason == "length"


def test_a_completion(client):
    whole = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3, seed=1)
    assert [choice.index for choice in whole.choices] == [0, 1]
    parts = client.completions.create(model="tiny", prompt="a", max_tokens=3, seed=1, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_several_answers_with_log_probabilities(client):
    answer = ask(client, n=3, logprobs=True, top_logprobs=2, temperature=1.5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert len(choice.logprobs.content) == 8
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
        data = bytes(byte for token in choice.logprobs.content for byte in token.bytes)
        assert data.decode(errors="replace") == choice.message.content


def test_json_of_a_schema(client):
    parsed = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Pet)
    assert isinstance(parsed.choices[0].message.parsed, Pet)
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, response_format=Pet
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pet)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "keep"}}])
def test_tools_whole_and_streamed(client, choice):
    asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    asked |= {"max_completion_tokens": 600}
    [told] = ask(client, **asked).choices
    assert told.finish_reason == "tool_calls"
    [call] = told.message.tool_calls
    assert call.function.name == "keep"
    Pet.model_validate_json(call.function.arguments)
    pieces = [
        piece
        for chunk in ask(client, **asked, stream=True)
        for piece in chunk.choices[0].delta.tool_calls or []
    ]
    assert {piece.index for piece in pieces} == {0}
    assert [piece.function.name for piece in pieces if piece.id] == ["keep"]
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    messages = [
        *HELLO,
        told.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "kept"},
    ]
    assert ask(client, messages=messages, tools=TOOLS, tool_choice="none").choices


def test_tools_by_the_library_s_own_parser(client):
    tool = openai.pydantic_function_tool(Pet, name="keep")
    parsed = client.chat.completions.parse(
        model="tiny", messages=HELLO, tools=[tool], tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    [call] = parsed.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Pet)


def test_a_response_whole_and_streamed(client):
    asked = {"model": "tiny", "input": "A pet?", "instructions": "Be brief.", "temperature": 0}
    asked |= {"max_output_tokens": 8, "store": False}
    whole = client.responses.create(**asked)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 8
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    with client.responses.stream(model="tiny", input="A pet?", text_format=Pet) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Pet)


def test_a_response_of_a_schema_and_with_a_call(client):
    parsed = client.responses.parse(model="tiny", input="A pet?", text_format=Pet)
    assert isinstance(parsed.output_parsed, Pet)
    tools = [{"type": "function", **FUNCTION}]
    asked = {"model": "tiny", "tools": tools, "tool_choice": "required"}
    told = client.responses.create(input="A pet?", parallel_tool_calls=False, **asked)
    [call] = told.output
    Pet.model_validate_json(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "kept"}
    items = [{"role": "user", "content": "A pet?"}, *told.output, output]
    told = client.responses.create(model="tiny", input=items, max_output_tokens=4)
    items += [*told.output, {"role": "user", "content": "And?"}]
    assert client.responses.create(model="tiny", input=items, max_output_tokens=4).output_text


def test_errors_have_their_types(client):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, temperature=3)
    assert (error.value.status_code, error.value.param) == (400, "temperature")
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, messages=[{"role": "user", "content": "word " * 5000}])
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, extra_body={"no_such_field": 1})
    assert error.value.param == "no_such_field"
    with pytest.raises(openai.NotFoundError) as error:
        ask(client, model="gpt-4")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="tiny", input="x", previous_response_id="resp_1")
    assert error.value.param == "previous_response_id"
    with pytest.raises(openai.AuthenticationError):
        ask(client.with_options(api_key="wrong"))
    with pytest.raises(openai.APITimeoutError):
        ask(client.with_options(timeout=0.001), max_completion_tokens=500)


def test_a_full_queue_is_a_rate_limit_that_is_retried():
    busy = OpenAI(base_url=f"{BUSY}/v1", api_key="none", max_retries=0, timeout=60)
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}

    def ask_all(client: OpenAI) -> list:
        """What four calls at once give; one runs, and one waits."""
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(client.completions.create, **asked) for _ in range(4)]
        return [call.exception() or call.result() for call in calls]

    refused = [told for told in ask_all(busy) if isinstance(told, Exception)]
    assert 1 <= len(refused) <= 3
    for error in refused:
        assert isinstance(error, openai.RateLimitError)
        assert error.type == "rate_limit_error"
        assert int(error.response.headers["retry-after"]) >= 1
    told = ask_all(busy.with_options(max_retries=50))
    assert [answer.usage.completion_tokens for answer in told] == [1500] * 4


def test_raw_answers_are_json(client):
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=HELLO, max_completion_tokens=2
    )
    assert raw.headers["x-request-id"]
    assert json.loads(raw.text)["object"] == "chat.completion"
