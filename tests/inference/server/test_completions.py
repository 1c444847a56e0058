"""`/v1/completions` and `/generate`: prompts of every kind, answers whole and in parts."""

import json

import pytest

from inference.beam_search import BeamParams, Hypothesis
from inference.requests.request import SamplingParams
from tests.inference.server.fake_engine import FakeEngine, counting
from tests.inference.server.http_client import events, post, tokenizer

IDS = [1, 2, 3]


def text_of(tokens) -> str:
    return tokenizer().decode(list(tokens), skip_special_tokens=True)


def expected(prompt: list[int], **params) -> str:
    return text_of(counting(prompt, SamplingParams(**params)))


def complete(body: dict, **values) -> dict:
    response = post("/v1/completions", body, **values)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_prompt_is_a_text_texts_token_ids_or_lists_of_them():
    ids = tokenizer()("def add")["input_ids"]
    text = expected(ids, max_tokens=16)
    for prompt in ("def add", ids, ["def add"], [ids]):
        answer = complete({"prompt": prompt})
        assert [choice["text"] for choice in answer["choices"]] == [text]
        assert answer["object"] == "text_completion"
        total = len(ids) + 16
        usage = {"prompt_tokens": len(ids), "completion_tokens": 16, "total_tokens": total}
        assert answer["usage"] == usage
    both = complete({"prompt": [ids, IDS], "max_tokens": 2, "n": 2, "seed": 4})
    found = [(choice["index"], choice["text"]) for choice in both["choices"]]
    each = [(ids, 4), (ids, 5), (IDS, 4), (IDS, 5)]
    assert found == [
        (i, expected(prompt, max_tokens=2, seed=seed)) for i, (prompt, seed) in enumerate(each)
    ]


def test_what_is_asked_reaches_the_engine():
    engines: list[FakeEngine] = []

    def make() -> FakeEngine:
        engines.append(FakeEngine())
        return engines[-1]

    body = {
        "prompt": IDS,
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0,
        "top_k": -1,
        "min_p": 0.25,
        "seed": -1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 2,
        "logit_bias": {"5": -100, "6": 1.5},
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "logprobs": 3,
        "stop": "zzz",
        "user": "somebody",
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
    }
    complete(body, make=make)
    [submit] = [message for message in engines[0].sent if hasattr(message, "params")]
    params = submit.params.model_dump(exclude={"constraint"})
    assert submit.params.constraint.kind == "json_schema"
    assert params == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=1e-10,
        min_p=0.25,
        seed=2**63 - 1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=2,
        logit_bias={5: -100.0, 6: 1.5},
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(9,),
        logprobs=3,
    ).model_dump(exclude={"constraint"})
    complete({"prompt": IDS}, make=make)
    [submit] = [message for message in engines[1].sent if hasattr(message, "params")]
    assert submit.params == SamplingParams(max_tokens=16, temperature=1.0)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_of_ids_is_scored_as_an_evaluation_harness_asks_for_it(max_tokens):
    body = {"prompt": [IDS, [7, 8]], "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    answer = complete(body | {"max_tokens": max_tokens})
    for choice, prompt in zip(answer["choices"], ([1, 2, 3], [7, 8]), strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(prompt) + max_tokens
        assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(prompt) - 1 + max_tokens)
        assert logprobs["top_logprobs"][0] is None
        assert all(max(top.values()) == -0.5 for top in logprobs["top_logprobs"][1:])
        assert choice["text"].startswith(text_of(prompt))
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert [choice["text"][at] for at in logprobs["text_offset"]] == [
            token[0] for token in logprobs["tokens"]
        ]
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens


def test_tokens_that_are_no_text_alone_are_told_as_bytes_and_offsets_count_characters():
    ids = tokenizer()("aé€b")["input_ids"]
    answer = complete({"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0})
    logprobs, text = answer["choices"][0]["logprobs"], answer["choices"][0]["text"]
    assert text == "aé€b"
    assert logprobs["tokens"][:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 3]


def test_logprobs_count_the_chosen_token_and_the_likeliest():
    for count in (0, 1, 5, 20):
        answer = complete({"prompt": IDS, "logprobs": count, "max_tokens": 2})
        logprobs = answer["choices"][0]["logprobs"]
        assert [len(top) for top in logprobs["top_logprobs"]] == [max(1, count)] * 2
    assert complete({"prompt": IDS, "max_tokens": 2})["choices"][0]["logprobs"] is None


def test_best_of_gives_the_answers_with_the_likeliest_tokens():
    def make() -> FakeEngine:
        engine = FakeEngine()
        engine._logprobs = lambda token, number: {token: -float(token)}  # type: ignore
        return engine

    body = {"prompt": IDS, "max_tokens": 1, "seed": 0, "n": 2}
    first = [counting(IDS, SamplingParams(max_tokens=1, seed=seed))[0] for seed in range(4)]
    answer = complete(body | {"best_of": 4}, make=make)
    assert [c["text"] for c in answer["choices"]] == [text_of([t]) for t in sorted(first)[:2]]
    assert answer["usage"]["completion_tokens"] == 4


def test_a_stream_has_the_text_of_the_answer_and_its_usage_where_it_is_asked_for():
    body = {"prompt": [IDS, [7, 8]], "n": 2, "seed": 3, "max_tokens": 5, "logprobs": 2}
    for echo in (False, True):
        whole = complete(body | {"echo": echo})
        options = {"include_usage": True, "continuous_usage_stats": True}
        asked = body | {"echo": echo, "stream": True, "stream_options": options}
        *parts, last = events(post("/v1/completions", asked))
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert {part["id"] for part in parts} == {last["id"]}
        for choice in whole["choices"]:
            own = [p["choices"][0] for p in parts if p["choices"][0]["index"] == choice["index"]]
            assert "".join(part["text"] for part in own) == choice["text"]
            assert [part["finish_reason"] for part in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1]["finish_reason"] == "length"
            for key, values in choice["logprobs"].items():
                assert [v for part in own for v in part["logprobs"][key]] == values
        counts = [part["usage"]["completion_tokens"] for part in parts]
        assert counts == sorted(counts)
    plain = events(post("/v1/completions", {"prompt": IDS, "stream": True}))
    assert all("usage" not in part for part in plain)
    assert "".join(part["choices"][0]["text"] for part in plain) == expected(IDS, max_tokens=16)


def test_a_stop_text_over_token_borders_ends_an_answer_streamed_or_not():
    text = expected(IDS, max_tokens=16)
    stop = text[4:7]
    body = {"prompt": IDS, "stop": ["never", stop]}
    answer = complete(body)["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (text[: text.index(stop)], "stop")
    parts = events(post("/v1/completions", body | {"stream": True}))
    assert "".join(part["choices"][0]["text"] for part in parts) == answer["text"]


def test_characters_are_whole_in_a_stream():
    ids = tokenizer()("Grüße, 世界")["input_ids"]

    def make() -> FakeEngine:
        return FakeEngine(answer=lambda *_: ids)

    body = {"prompt": IDS, "max_tokens": len(ids), "stream": True}
    parts = events(post("/v1/completions", body, make=make))
    assert "".join(part["choices"][0]["text"] for part in parts) == "Grüße, 世界"
    assert not any("\ufffd" in part["choices"][0]["text"] for part in parts)


def test_token_ids_are_told_where_they_are_asked_for():
    body = {"prompt": "def", "max_tokens": 3, "return_token_ids": True}
    ids = tokenizer()("def")["input_ids"]
    choice = complete(body)["choices"][0]
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == counting(ids, SamplingParams(max_tokens=3))
    parts = [p["choices"][0] for p in events(post("/v1/completions", body | {"stream": True}))]
    assert parts[0]["prompt_token_ids"] == ids
    assert [t for part in parts for t in part["token_ids"]] == choice["token_ids"]


def test_an_answer_longer_than_the_context_ends_with_it():
    answer = complete({"prompt": [5] * 500, "max_tokens": 10**6})
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.fixture
def searching():
    """An engine whose beam searches are recorded, and the list of them."""
    searches = []

    async def beam(prompt, params):
        searches.append((prompt, params))
        return [Hypothesis((65 + i, 0), -1.0 - i, -2.0, "stop", None) for i in range(params.n)]

    def make() -> FakeEngine:
        engine = FakeEngine()
        engine.client.beam = beam  # type: ignore[method-assign]
        return engine

    return make, searches


def test_beams_are_searched_where_a_width_is_given(searching):
    make, searches = searching
    body = {"prompt": [IDS, [4]], "beam_width": 3, "n": 2, "length_penalty": 0, "max_tokens": 9}
    answer = complete(body | {"temperature": 0, "early_stopping": True}, make=make)
    assert [c["text"] for c in answer["choices"]] == [text_of([65]), text_of([66])] * 2
    assert {c["finish_reason"] for c in answer["choices"]} == {"stop"}
    params = BeamParams(beam_width=3, n=2, max_tokens=9, length_penalty=0, early_stopping=True)
    assert searches == [(IDS, params), ([4], params)]
    for name, value in {"temperature": 1, "stop": "x", "stream": True, "seed": 5}.items():
        response = post("/v1/completions", body | {name: value}, make=make)
        assert response.json()["error"]["param"] == name
    needs = post("/v1/completions", {"prompt": IDS, "length_penalty": 2.0})
    assert "beam_width" in needs.json()["error"]["message"]


def test_generate_answers_as_the_server_it_is_ported_from():
    ids = tokenizer()("def add")["input_ids"]
    text = expected(ids, max_tokens=4)
    body = {"prompt": "def add", "max_new_tokens": 4}
    assert post("/generate", body | {"stream": "False"}).json() == {"text": text}
    for path, more in (("/generate", {"stream": "true"}), ("/generate/stream", {})):
        *parts, end = post(path, body | more).content.split(b"\0")
        told = [json.loads(part)["text"] for part in parts]
        assert end == b""
        assert told[-1] == text
        assert told == sorted(told, key=len)


def test_generate_searches_beams_and_takes_no_field_without_effect(searching):
    make, searches = searching
    body = {"prompt": "def add", "max_new_tokens": 4, "num_beams": 3, "length_penalty": 2.0}
    assert post("/generate", body, make=make).json() == {"text": text_of([65])}
    params = BeamParams(beam_width=3, max_tokens=4, length_penalty=2.0)
    assert searches == [(tokenizer()("def add")["input_ids"], params)]
    for name, value in {
        "temperature": 0.5,
        "do_sample": True,
        "stop": ["x"],
        "stream": True,
    }.items():
        error = post("/generate", body | {name: value}, make=make).json()["error"]
        assert error["param"] == name
        assert "no place in a beam search" in error["message"]
    error = post("/generate", body | {"num_beams": 1}).json()["error"]
    assert (error["param"], "num_beams" in error["message"]) == ("length_penalty", True)
