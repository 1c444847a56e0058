"""What langchain-openai and litellm see of a server; run by `test_clients`, as `openai_client`."""

import json
import os
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask a server elsewhere for prices

import litellm
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

URL, KEY = os.environ["PTQ_URL"], os.environ["PTQ_KEY"]
LITELLM = {"model": "openai/tiny", "api_base": f"{URL}/v1", "api_key": KEY}
HELLO = [{"role": "user", "content": "A pet?"}]


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    tame: bool
    name: str = Field(max_length=4)


@tool
def keep(kind: Literal["cat", "dog"], tame: bool) -> str:
    """Keep a pet."""
    return f"{kind} {tame}"


def chat(**values) -> ChatOpenAI:
    return ChatOpenAI(
        **{"model": "tiny", "base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0, "seed": 1}
        | {"max_tokens": 600}
        | values
    )


def test_langchain_chats_and_streams():
    model = chat(max_tokens=8, stream_usage=True)
    whole = model.invoke("A pet?")
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata["output_tokens"] == 8
    gathered = None
    for chunk in model.stream("A pet?"):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered.content == whole.content
    assert gathered.usage_metadata == whole.usage_metadata


def test_langchain_reads_log_probabilities():
    told = chat(max_tokens=4).bind(logprobs=True, top_logprobs=2).invoke("A pet?")
    assert len(told.response_metadata["logprobs"]["content"]) == 4


def test_langchain_calls_tools():
    model = chat(max_tokens=600).bind_tools(
        [keep], tool_choice="any", parallel_tool_calls=False, strict=True
    )
    told = model.invoke("A pet?")
    [call] = told.tool_calls
    assert call["name"] == "keep"
    assert set(call["args"]) == {"kind", "tame"}
    gathered = None
    for chunk in model.stream("A pet?"):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered.tool_calls[0]["args"] == call["args"]
    result = keep.invoke(call)
    assert isinstance(result, ToolMessage)
    answer = chat(max_tokens=4).invoke([HumanMessage("A pet?"), told, result])
    assert isinstance(answer, AIMessage)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_s_structured_output(method):
    made = chat(max_tokens=600).with_structured_output(Pet, method=method).invoke("A pet?")
    assert isinstance(made, Pet)


def test_langchain_over_responses():
    model = chat(max_tokens=8, use_responses_api=True, seed=None)
    assert model.invoke("A pet?").usage_metadata["output_tokens"] == 8
    parts = list(model.stream("A pet?"))
    assert len(parts) > 1
    bound = chat(use_responses_api=True, seed=None).bind_tools([keep], tool_choice="any")
    assert bound.invoke("A pet?").tool_calls[0]["name"] == "keep"


def test_langchain_s_errors():
    with pytest.raises(openai.BadRequestError):
        chat(temperature=3).invoke("A pet?")
    with pytest.raises(openai.AuthenticationError):
        chat(api_key="wrong").invoke("A pet?")


def test_litellm_chats_and_streams():
    asked = {"messages": HELLO, "max_tokens": 8, "seed": 1}
    whole = litellm.completion(**LITELLM, **asked, n=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    parts = list(
        litellm.completion(**LITELLM, **asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert parts[-1].usage.completion_tokens == 8


def test_litellm_calls_tools_and_writes_json():
    schema = Pet.model_json_schema() | {"additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "keep", "parameters": schema}}]
    told = litellm.completion(
        **LITELLM, messages=HELLO, tools=tools, tool_choice="required", max_tokens=600,
        parallel_tool_calls=False,
    )  # fmt: skip
    assert told.choices[0].finish_reason == "tool_calls"
    Pet.model_validate_json(told.choices[0].message.tool_calls[0].function.arguments)
    told = litellm.completion(**LITELLM, messages=HELLO, response_format=Pet, max_tokens=600)
    assert set(json.loads(told.choices[0].message.content)) == {"kind", "tame", "name"}


def test_litellm_s_errors():
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**LITELLM, messages=HELLO, temperature=3, num_retries=0)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**LITELLM | {"api_key": "wrong"}, messages=HELLO, num_retries=0)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            **LITELLM, messages=[{"role": "user", "content": "word " * 5000}], num_retries=0
        )
