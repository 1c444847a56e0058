"""`/v1/chat/completions`: messages through the template, answers whole and in parts."""

import pytest

from formats.errors import RequestError
from inference.requests.request import SamplingParams
from inference.server.serving import create_app
from tests.inference.server.fake_engine import FakeEngine, counting
from tests.inference.server.http_client import events, post, settings, tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def rendered(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def chat(body: dict, **values) -> dict:
    response = post("/v1/chat/completions", body, **values)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (HELLO, "user: hello\nassistant: "),
        ([{"role": "developer", "content": "x"}, *HELLO], "system: x\nuser: hello\nassistant: "),
        (
            [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}],
            "user: a\nb\nassistant: ",
        ),
        (
            [*HELLO, {"role": "assistant", "content": None, "refusal": None}, HELLO[0]],
            "user: hello\nassistant: \nuser: hello\nassistant: ",
        ),
    ],
)
def test_messages_are_written_by_the_template(messages, text):
    answer = chat({"messages": messages, "max_tokens": 3, "return_token_ids": True})
    assert answer["prompt_token_ids"] == rendered(text)
    [choice] = answer["choices"]
    tokens = counting(rendered(text), SamplingParams(max_tokens=3))
    message = {"role": "assistant", "content": tokenizer().decode(tokens), "refusal": None}
    assert choice["message"] == message
    assert choice["token_ids"] == tokens


def test_a_template_that_cannot_be_read_is_refused_before_anybody_chats():
    broken = settings(chat_template="{% for m in messages %}")
    with pytest.raises(RequestError, match=r"line 1 of the chat template: .*--chat-template FILE"):
        create_app(FakeEngine().client, broken)


def test_an_answer_may_go_on_with_the_last_message():
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    body = {"messages": begun, "max_tokens": 1, "return_token_ids": True}
    body |= {"add_generation_prompt": False, "continue_final_message": True}
    assert chat(body)["prompt_token_ids"] == rendered("user: hello\nassistant: I am")
    refused = post("/v1/chat/completions", body | {"add_generation_prompt": True})
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_an_answer_may_fill_the_context_by_default():
    answer = chat({"messages": HELLO})
    assert answer["usage"]["total_tokens"] == 512
    assert chat({"messages": HELLO, "max_completion_tokens": 4})["usage"]["completion_tokens"] == 4


def test_a_stream_begins_with_the_role_and_ends_with_the_reason():
    body = {"messages": HELLO, "n": 2, "seed": 1, "max_tokens": 6}
    whole = chat(body)
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = events(post("/v1/chat/completions", asked))
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert {part["id"] for part in parts} == {last["id"]}
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert all(part["usage"] is None for part in parts)
    for choice in whole["choices"]:
        own = [p["choices"][0] for p in parts if p["choices"][0]["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": None}
        assert own[-1]["delta"] == {}
        assert own[-1]["finish_reason"] == "length"
        assert all(part["finish_reason"] is None for part in own[:-1])
        text = "".join(part["delta"]["content"] for part in own[1:-1])
        assert text == choice["message"]["content"]
    assert whole["choices"][0]["message"] != whole["choices"][1]["message"]


def test_log_probabilities_have_bytes_and_the_likeliest_tokens():
    body = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 3}
    whole = chat(body)["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in whole] == [3, 3]
    for entry in whole:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["top_logprobs"][0] == {k: v for k, v in entry.items() if k != "top_logprobs"}
    parts = events(post("/v1/chat/completions", body | {"stream": True}))
    told = [part["choices"][0]["logprobs"] for part in parts]
    assert [entry for part in told if part for entry in part["content"]] == whole
    plain = chat({"messages": HELLO, "max_tokens": 1, "logprobs": True})
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_a_template_that_refuses_a_chat_says_so():
    response = post("/v1/chat/completions", {"messages": [{"role": "user", "content": "refuse"}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert "such chats are refused" in response.json()["error"]["message"]


def test_a_model_without_a_template_says_what_to_do():
    response = post("/v1/chat/completions", {"messages": HELLO}, chat_template=None)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "--chat-template" in message
    assert "/v1/completions" in message


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_control_tokens_in_a_message_are_text_unless_asked_for(path):
    text = "user: a<|endoftext|>b\nassistant: "
    for allowed in (False, True):
        messages = [{"role": "user", "content": [{"type": "text", "text": "a<|endoftext|>b"}]}]
        body = {"messages": messages}
        if path != "/tokenize":
            body |= {"max_tokens": 1, "return_token_ids": True}
        if path == "/v1/responses":
            body = {"input": "a<|endoftext|>b", "max_output_tokens": 16}
        told = post(path, body, special_tokens_in_content=allowed).json()
        split = not allowed
        expected = tokenizer()(text, add_special_tokens=False, split_special_tokens=split)
        if path == "/v1/responses":
            assert told["usage"]["input_tokens"] == len(expected["input_ids"])
        else:
            ids = told.get("prompt_token_ids", told.get("tokens"))
            assert ids == expected["input_ids"]


def test_variables_reach_the_template():
    template = "{{ enable_thinking }}{{ messages[0].content }}"
    body = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True}
    body["chat_template_kwargs"] = {"enable_thinking": "yes"}
    answer = chat(body, chat_template=template)
    assert answer["prompt_token_ids"] == rendered("yeshello")
    for name in ("tokenize", "tools", "chat_template"):
        body["chat_template_kwargs"] = {name: 1}
        refused = post("/v1/chat/completions", body)
        assert refused.json()["error"]["param"] == "chat_template_kwargs"


def test_what_the_engine_refuses_is_the_requests_fault_also_in_a_stream():
    def make() -> FakeEngine:
        return FakeEngine(refuse=("response_format: no such grammar", "response_format"))

    for stream in (False, True):
        response = post("/v1/chat/completions", {"messages": HELLO, "stream": stream}, make=make)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "response_format"
