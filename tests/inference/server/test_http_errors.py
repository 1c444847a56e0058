"""Whatever is wrong with a request, the answer is an error object that says what, and where."""

import asyncio
import json
import logging
from dataclasses import replace

import pytest

from inference.server import call as calls
from inference.server.engine_client import QueueLimits
from inference.server.settings import Limits
from tests.inference.server.fake_engine import INFO, FakeEngine
from tests.inference.server.http_client import ask, post, talk, talking, tokenizer

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def error_of(response, status: int) -> dict:
    """The error object of an answer with that status."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def refused(body: dict, param: str | None, path: str = COMPLETIONS) -> str:
    """The message of a 400 that names the field."""
    error = error_of(post(path, body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    return error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b'"text"',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00 and more"}',
        b'{"prompt": "\xff"}',
        '{"prompt": "ä"}'.encode("latin-1"),
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": "a"} more',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=range(18),
)
def test_a_body_that_is_no_strict_json_is_refused(body):
    for path in (COMPLETIONS, CHAT, "/tokenize", "/generate"):
        error_of(ask("POST", path, body), 400)


def test_a_body_that_is_too_deep_is_told_so():
    deep = b'{"prompt": "a", "response_format": ' + b"[" * 300 + b"]" * 300 + b"}"
    message = error_of(ask("POST", COMPLETIONS, deep), 400)["message"]
    assert "more than 200 objects and lists in one another" in message
    assert "UTF-8" not in message


def test_numbers_that_are_not_finite_are_refused_where_anything_may_stand():
    text = '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": 1e999}}'
    error = error_of(ask("POST", CHAT, text.encode()), 400)
    assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 415),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json; charset=utf-16"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
        ({"Content-Type": "application/json; charset=UTF-8"}, 200),
        ({"Content-Type": "application/vnd.api+json"}, 200),
    ],
)
async def test_a_body_that_says_that_it_is_no_json_is_refused(headers, status):
    async with talking() as (client, _):
        response = await client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == status
    if status != 200:
        error_of(response, status)


def test_a_body_that_is_too_large_is_refused_while_it_comes():
    sent = 0

    async def pieces():
        nonlocal sent
        for _ in range(1000):
            sent += 1000
            yield b"x" * 1000

    async def scenario(client, engine):
        headers = {"Content-Type": "application/json"}
        await client.post(COMPLETIONS, content=b"{}", headers=headers)
        declared = headers | {"Content-Length": "1000000000"}
        first = await client.post(COMPLETIONS, content=pieces(), headers=headers)
        second = await client.post(COMPLETIONS, content=pieces(), headers=declared)
        return first, second

    for response in talk(scenario, limits=Limits(body_bytes=5000)):
        assert "5000 bytes" in error_of(response, 413)["message"]
        assert response.headers["connection"] == "close"


WRONG: dict[str, list] = {
    "temperature": [True, "1", -0.1, 2.1],
    "top_p": [1.5],
    "top_k": [1.5, -2],
    "min_p": [2],
    "max_tokens": [True, 0, -1, 1.5, 2**40],
    "n": [0, 17, False],
    "best_of": [17],
    "logprobs": [21, -1, True],
    "presence_penalty": [3],
    "frequency_penalty": [-3],
    "repetition_penalty": [0],
    "seed": [2**63, 0.5],
    "stream": [1, "true"],
    "echo": ["yes"],
    "stop": [5, ["a"] * 17, {"a": 1}],
    "stop_token_ids": [[1] * 65, [384]],
    "user": [5],
    "model": [5],
    "prompt": [None, 5, {"a": 1}, ["a"] * 257],
    "suffix": ["b"],
    "temprature": [1],
    "response_format": [{"type": "xml"}, "json_object"],
    "beam_width": [17],
    "min_tokens": [17],
    "logit_bias": [[1], {str(i): 1 for i in range(301)}],
    "stream_options": [{"include_usage": True}],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, own in WRONG.items() for v in own])
def test_a_field_that_is_out_of_range_or_of_another_type_is_named(field, value):
    assert field in refused({"prompt": "a"} | {field: value}, field)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a" * 257]}, "stop[0]"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
    ],
)
def test_a_fault_inside_a_field_is_named_with_its_place(body, param):
    refused({"prompt": "a"} | body, param)


def test_messages_speak_of_json_and_of_exact_limits():
    message = refused({"messages": ["hi"]}, "messages[0]", CHAT)
    assert message == "messages[0]: should be an object; found 'hi'"
    many = {"prompt": "a", "logit_bias": {str(i): 1 for i in range(301)}}
    assert "logit_bias: should have at most 300 items" in refused(many, "logit_bias")
    assert f"equal to {2**63 - 1}; found" in refused({"prompt": "a", "seed": 2**63}, "seed")


def test_an_unknown_field_gets_a_guess():
    assert "did you mean 'temperature'" in refused({"prompt": "a", "temprature": 1}, "temprature")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {}),
        ("web_search_options", {}),
        ("metadata", {"a": "b"}),
        ("metadata", []),
        ("metadata", 0),
        ("reasoning_effort", "low"),
        ("functions", []),
        ("function_call", "auto"),
        ("store", True),
        ("verbosity", "low"),
        ("service_tier", "priority"),
        ("top_logprobs", 2),
        ("top_logprobs", 21),
        ("logprobs", 5),
        ("max_tokens", 0),
        ("n", 17),
        ("unknown", 1),
    ],
)
def test_what_openai_has_and_this_server_has_not_is_refused_by_name(field, value):
    refused({"messages": HELLO} | {field: value}, field, CHAT)


def test_what_changes_nothing_is_taken():
    body = {
        "messages": HELLO,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "modalities": ["text"],
        "service_tier": "auto",
        "store": False,
        "verbosity": "medium",
        "prompt_cache_key": "a",
        "safety_identifier": "b",
        "audio": None,
        "metadata": None,
        "functions": None,
        "stop": None,
        "response_format": {"type": "text"},
    }
    assert post(CHAT, body).status_code == 200
    refused(body | {"max_tokens": 2}, "max_tokens", CHAT)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([5], "messages[0]"),
        ([*HELLO, {"role": "robot", "content": "a"}], "messages[1].role"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "a", "image": "b"}], "messages[0].image"),
    ],
)
def test_messages_that_are_none_are_named(messages, param):
    told = refused({"messages": messages}, param, CHAT)
    assert not set(told.split()) & {"Input", "List", "String", "validation,"}, "the library's words"


def test_a_prompt_that_is_empty_or_too_long_or_unknown_is_refused_with_the_numbers():
    for prompt in ("", [], [[]], [""], ["a", ""], [[1], []]):
        assert "empty" in refused({"prompt": prompt}, "prompt")
    for prompt in ([1] * 512, [[1], [1] * 512]):
        message = refused({"prompt": prompt}, "prompt")
        assert "512 tokens" in message
        assert "maximum context length" in message
    long = refused({"messages": [{"role": "user", "content": "a" * 5000}]}, "messages", CHAT)
    assert "512 tokens" in long
    count = len(tokenizer()(f"user: {'a' * 5000}\nassistant: ")["input_ids"])
    assert f"{count} tokens" in long
    huge = refused({"prompt": "a" * 10**6}, "prompt")
    assert "1000000 characters" in huge
    assert "512 tokens" in huge
    for prompt in ([384], [1, 10**9]):
        assert "vocabulary of 384" in refused({"prompt": prompt}, "prompt")
    assert "prompt[0]" in refused({"prompt": [-1]}, "prompt[0]")
    refused({"tokens": [384]}, "tokens", "/detokenize")


def test_a_model_that_is_not_served_is_not_found():
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
        error = error_of(post(path, body | {"model": "gpt-x"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        named = post(path, body | {"model": "other", "max_tokens": 1}, aliases=("other",))
        assert named.json()["model"] == "other"
    error_of(ask("GET", "/v1/models/gpt-x"), 404)
    assert ask("GET", "/v1/models/a/b", aliases=("a/b",)).json()["id"] == "a/b"
    listed = ask("GET", "/v1/models", aliases=("a/b",)).json()["data"]
    assert "has 'tiny' and 'a/b'" in ask("GET", "/v1/models/x", aliases=("a/b",)).text
    assert [model["id"] for model in listed] == ["tiny", "a/b"]


@pytest.mark.parametrize(
    "path",
    [
        "/nope",
        "/v1",
        "/v1/completions/",
        "//v1/completions",
        "/health/",
        "/../../etc/passwd",
        "/v1/models/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/..%2f..%2fetc%2fpasswd",
        "/docs",
        "/redoc",
    ],
)
def test_a_path_that_is_no_route_is_not_found(path):
    error_of(ask("GET", path), 404)


async def test_routes_answer_below_the_prefix_of_a_proxy_too():
    async with talking(root_path="/a/llm", api_key="secret") as (client, _):
        for prefix in ("", "/a/llm"):
            assert (await client.get(f"{prefix}/health")).json() == {"status": "ready"}
            assert b"<!doctype html>" in (await client.get(f"{prefix}/")).content
            error_of(await client.get(f"{prefix}/v1/models"), 401)
            shown = {"Authorization": "Bearer secret"}
            answer = await client.get(f"{prefix}/v1/models/tiny", headers=shown)
            assert answer.json()["id"] == "tiny"
            body = {"prompt": "a", "max_tokens": 2}
            answer = await client.post(f"{prefix}{COMPLETIONS}", json=body, headers=shown)
            assert answer.json()["usage"]["completion_tokens"] == 2
            document = (await client.get(f"{prefix}/openapi.json", headers=shown)).json()
            assert document["servers"] == [{"url": "/a/llm"}]
        alone = await client.get("/a/llm")
        assert (alone.status_code, alone.headers["location"]) == (307, "/a/llm/")
        for path in ("/a/llmore/health", "/a/llm/a/llm/health"):
            error_of(await client.get(path, headers=shown), 404)


def test_a_method_that_a_route_has_not_is_told():
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        response = ask(method, COMPLETIONS)
        error_of(response, 405)
        assert response.headers["allow"] == "POST"
    for path in ("/", "/health", "/v1/models", "/v1/models/tiny", "/openapi.json"):
        response = ask("DELETE", path)
        assert "it has no DELETE, but GET, HEAD" in error_of(response, 405)["message"]
        assert response.headers["allow"] == "GET, HEAD"


async def test_what_can_be_read_can_be_probed():
    async with talking() as (client, _):
        for path in ("/", "/health", "/version", "/v1/models", "/v1/models/tiny"):
            whole, probed = await client.get(path), await client.head(path)
            assert (probed.status_code, probed.content) == (200, b"")
            assert probed.headers["content-length"] == whole.headers["content-length"]
        assert (await client.head("/v1/models/other")).status_code == 404
        assert (await client.head(COMPLETIONS)).status_code == 405


async def test_the_key_is_needed_everywhere_but_for_health():
    async with talking(api_key="secret") as (client, _):
        paths = ["/v1/models", "/metrics", "/openapi.json", "/version", "/tokenizer_info", "/nope"]
        for path in paths:
            error = error_of(await client.get(path), 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/generate"):
            error_of(await client.post(path, json={"prompt": "a"}), 401)
        wrong = ["Bearer secre", "Bearer secrets", "Bearer", "Basic secret", "secret", "Bearer s é"]
        for value in wrong:
            headers = {"Authorization": value.encode("latin-1")}
            response = await client.get("/v1/models", headers=headers)
            error_of(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
        both = [("Authorization", "Bearer no"), ("Authorization", "Bearer secret")]
        error_of(await client.get("/v1/models", headers=both), 401)
        right = {"Authorization": "Bearer secret"}
        assert (await client.get("/v1/models", headers=right)).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_the_queue_is_full_at_once_and_says_when_to_come_back():
    def make() -> FakeEngine:
        return FakeEngine(hold=True, limits=QueueLimits(requests=0))

    body = {"prompt": "a", "n": 4}
    async with talking(make) as (client, engine):
        first = asyncio.ensure_future(client.post(COMPLETIONS, json={"prompt": "a"}))
        while not engine.running:
            await asyncio.sleep(0.001)
        response = await client.post(COMPLETIONS, json=body)
        assert len(engine.running) == 1  # of a call that is refused nothing is queued
        assert engine.client.in_flight == 1
        engine.hold = False
        assert (await first).status_code == 200
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        never = await client.post(COMPLETIONS, json=body | {"n": 5})
        assert "5 answers" in error_of(never, 400)["message"]
    error = error_of(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert int(response.headers["retry-after"]) >= 1
    assert int(response.headers["retry-after-ms"]) >= 1000


async def test_health_tells_whether_requests_are_answered():
    async with talking(lambda: FakeEngine(warm=False)) as (client, engine):
        assert error_of(await client.get("/health"), 503)["code"] == "starting"
        error_of(await client.get("/v1/models"), 503)
        error_of(await client.post(COMPLETIONS, json={"prompt": "a"}), 503)
        engine.start()
        assert (await client.get("/health")).json() == {"status": "ready"}
        await engine.client.drain(1)
        assert error_of(await client.get("/health"), 503)["code"] == "draining"
        response = await client.post(COMPLETIONS, json={"prompt": "a"})
        error_of(response, 503)
        assert "retry-after" in response.headers
        engine.die()
        assert "exit code -9" in error_of(await client.get("/health"), 503)["message"]
        error_of(await client.post(COMPLETIONS, json={"prompt": "a"}), 503)


@pytest.mark.parametrize("how", ["fail", "die"])
@pytest.mark.parametrize("n", [1, 2])
async def test_an_engine_that_fails_ends_answers_with_an_error(how, n):
    status = {"fail": 500, "die": 503}[how]
    info = replace(INFO, max_batch_size=3 * n)
    async with talking(lambda: FakeEngine(delay=0.005, info=info)) as (client, engine):
        body = {"prompt": [1, 2], "max_tokens": 400, "n": n}
        whole = asyncio.ensure_future(client.post(COMPLETIONS, json=body))
        parts = asyncio.ensure_future(client.post(COMPLETIONS, json=body | {"stream": True}))
        chats = {"messages": HELLO, "max_tokens": 400, "n": n, "stream": True}
        chat = asyncio.ensure_future(client.post(CHAT, json=chats))
        while len(engine.running) < 3 * n:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        getattr(engine, how)()
        error_of(await whole, status)
        for response in (await parts, await chat):
            assert response.status_code == 200
            *_, error, done, end = response.text.split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
            assert set(json.loads(error.removeprefix("data: "))["error"]) >= {"message", "code"}


async def test_a_defect_is_an_error_without_internals(caplog):
    async with talking() as (client, engine):
        engine.client.submit = lambda *_: 1 / 0
        with caplog.at_level(logging.ERROR, "ptq.serve"):
            error = error_of(await client.post(COMPLETIONS, json={"prompt": "a"}), 500)
    assert "ZeroDivision" not in error["message"]
    assert "ZeroDivisionError" in caplog.text


def test_a_defect_ends_a_stream_with_an_event_and_its_request(caplog, monkeypatch):
    seen = []

    def check(delta):
        seen.append(delta)
        return delta if len(seen) < 3 else 1 / 0

    async def scenario(client, engine):
        monkeypatch.setattr(calls, "_check", check)
        body = {"prompt": "a", "max_tokens": 400, "stream": True}
        response = await client.post(COMPLETIONS, json=body)
        assert len(engine.aborted) == 1
        return response

    with caplog.at_level(logging.ERROR, "ptq.serve"):
        *_, error, done, _ = talk(scenario, lambda: FakeEngine(delay=0.001)).text.split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "ZeroDivision" not in error
    assert "ZeroDivisionError" in caplog.text


def test_a_request_is_named_in_its_answer_and_in_the_log_but_its_text_is_not(caplog):
    async def scenario(client, engine):
        for name in ("my-id", "has\nline", "ä", "x" * 200, None):
            headers = {} if name is None else {"X-Request-Id": name.encode()}
            body = {"prompt": "secret", "max_tokens": 3}
            response = await client.post(COMPLETIONS, json=body, headers=headers)
            assert (response.headers["x-request-id"] == name) == (name == "my-id")
        error_of(await client.get("/nope%0afaked line"), 404)

    with caplog.at_level(logging.INFO, "ptq.serve"):
        talk(scenario, log_requests=True)
    lines = [record.getMessage() for record in caplog.records if record.name == "ptq.serve"]
    assert lines[0].startswith("my-id POST /v1/completions 200 ")
    assert "tokens=4+3" in lines[0]
    assert "secret" not in caplog.text
    with caplog.at_level(logging.INFO, "ptq.serve"):
        talk(scenario, log_requests=True, log_texts=True)
    assert "secret" in caplog.text
    assert all("\n" not in line for line in lines)


def test_other_web_pages_may_call_only_where_they_are_named():
    origin = "https://example.org"
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}

    async def scenario(client, engine):
        asked = await client.options(COMPLETIONS, headers=headers)
        called = await client.get("/v1/models", headers={"Origin": origin})
        return [response.headers.get("access-control-allow-origin") for response in (asked, called)]

    assert talk(scenario) == [None, None]
    assert talk(scenario, cors_origins=(origin,), api_key="secret") == [origin, origin]
    assert talk(scenario, cors_origins=("https://other.org",)) == [None, None]
