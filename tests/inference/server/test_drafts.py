"""Several tokens of a step: in streams, in metrics, and what a client may say of its answer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from inference.requests.request import SamplingParams
from inference.server.messages import EngineStats, Step, Submit
from inference.server.metrics import Metrics
from inference.speculate.counts import DraftCounts
from tests.inference.server.fake_engine import INFO, FakeEngine, Reading
from tests.inference.server.http_client import events, post, tokenizer
from tests.inference.server.test_metrics import values

pytestmark = pytest.mark.anyio
TOGETHER = partial(FakeEngine, together=5)
SPECULATES = replace(INFO, speculates=True)
DRAFTED = partial(FakeEngine, together=5, drafts=8, info=SPECULATES)
ASKED = {
    "completions": {"prompt": [1, 2, 3]},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}
BODY = {"prompt": [1, 2, 3], "max_tokens": 23, "logprobs": 2, "n": 2, "seed": 7, "stream": True}


def told(engine) -> tuple[dict, dict]:
    """Texts and log probabilities of a stream's answers."""
    texts, chances = dict[int, str](), dict[int, list]()
    for event in events(post("/v1/completions", BODY, make=engine)):
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            found = choice["logprobs"] or {"token_logprobs": [], "tokens": []}
            pairs = zip(found["tokens"], found["token_logprobs"], strict=True)
            chances.setdefault(choice["index"], []).extend(pairs)
    return texts, chances


def test_tokens_that_come_together_stream_as_those_that_come_one_by_one():
    alone, together = told(FakeEngine), told(TOGETHER)
    assert alone == together
    assert [len(found) for found in together[1].values()] == [23, 23]


async def test_tokens_of_a_step_share_the_time_since_the_step_before():
    engine = TOGETHER(delay=0.02)
    async for _ in Reading(engine.client.submit([1], SamplingParams(max_tokens=20))):
        pass
    measures = engine.client.measures
    assert sum(measures.inter_token.counts) == 19
    assert 0.05 < measures.inter_token.total < 0.5  # three steps beyond the first
    assert measures.inter_token.counts[0] == 4  # those behind the first token alone


async def test_drafts_are_counted_by_position():
    engine = FakeEngine()
    stats = EngineStats(drafts=DraftCounts(10, (10, 8), (6, 3)))
    engine.client.take(Step(stats=stats))
    found = values(Metrics(engine.client, "tiny"))
    assert found["ptq:spec_decode_num_drafts_total"] == 10
    assert found["ptq:spec_decode_num_draft_tokens_total"] == 18
    assert found["ptq:spec_decode_num_accepted_tokens_total"] == 9
    assert found["ptq:spec_decode_num_accepted_tokens_per_pos_total position=0"] == 6
    assert found["ptq:spec_decode_num_accepted_tokens_per_pos_total position=1"] == 3


@pytest.mark.parametrize(
    "content", ["a = 1\n", [{"type": "text", "text": t} for t in ("a =", " 1\n")]]
)
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_predicted_output_is_a_reference_of_drafts(route, content):
    engines: list[FakeEngine] = []

    def make() -> FakeEngine:
        engines.append(FakeEngine())
        return engines[-1]

    chat = {"messages": [{"role": "user", "content": "a"}]}
    body = {"prediction": {"type": "content", "content": content}, "max_tokens": 2}
    body |= {"prompt": "a"} if route == "completions" else chat
    assert post(f"/v1/{route}", body, make=make).status_code == 200
    sent = [message for message in engines[-1].sent if isinstance(message, Submit)]
    assert [message.params.reference for message in sent] == ["a = 1\n"]


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content", "content": "a" * 300_000}, "prediction.content"),
    ],
)
def test_a_predicted_output_that_is_no_text_or_too_long_is_refused(prediction, param):
    body = {"messages": [{"role": "user", "content": "a"}], "prediction": prediction}
    answer = post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


def usage(route: str, body: dict, make: Callable[[], FakeEngine] = DRAFTED) -> dict:
    """What an answer tells of its tokens, and what its stream does, which is the same."""
    asked, options = ASKED[route] | body, {"stream_options": {"include_usage": True}}
    whole = post(f"/v1/{route}", asked, make=make).json()["usage"]
    stream = events(post(f"/v1/{route}", asked | {"stream": True} | options, make=make))
    assert [event["usage"] for event in stream if event["usage"]] == [whole]
    return whole


@pytest.mark.parametrize("route", ASKED)
def test_usage_tells_what_became_of_the_drafts_of_all_answers(route):
    found = usage(route, {"max_tokens": 23, "n": 2})
    assert found["completion_tokens"] == 46
    assert found["completion_tokens_details"] == {
        "accepted_prediction_tokens": 2 * (4 * 4 + 2),  # steps of 5, 5, 5, 5 and 3 tokens
        "rejected_prediction_tokens": 2 * (4 * 4 + 6),
    }


@pytest.mark.parametrize("route", ASKED)
def test_drafts_behind_a_stop_text_count_as_rejected(route):
    sampled = {"max_tokens": 23, "return_token_ids": True}
    (choice,) = post(f"/v1/{route}", ASKED[route] | sampled, make=DRAFTED).json()["choices"]
    stop = tokenizer().decode(
        choice["token_ids"][6:8]
    )  # ends with the third token of the second step
    found = usage(route, {"max_tokens": 23, "stop": stop})
    assert found["completion_tokens"] == 8
    assert found["completion_tokens_details"] == {
        "accepted_prediction_tokens": 4 + 3,
        "rejected_prediction_tokens": 4 + 5,
    }


@pytest.mark.parametrize("route", ASKED)
def test_usage_tells_of_drafts_where_the_server_makes_any(route):
    assert "completion_tokens_details" not in usage(route, {"max_tokens": 3}, FakeEngine)
    found = usage(route, {"max_tokens": 3}, partial(FakeEngine, info=SPECULATES))
    none = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert found["completion_tokens_details"] == none


@pytest.mark.parametrize("route", ASKED)
def test_usage_tells_what_the_cache_held_of_each_prompt_once(route):
    assert "prompt_tokens_details" not in usage(route, {"max_tokens": 3}, FakeEngine)
    found = usage(route, {"max_tokens": 3, "n": 2}, partial(FakeEngine, found=5))
    assert found["prompt_tokens_details"] == {"cached_tokens": 5}
    told = post("/v1/responses", {"input": "a"}, make=partial(FakeEngine, found=5)).json()
    assert told["usage"]["input_tokens_details"]["cached_tokens"] == 5


def test_usage_so_far_tells_the_drafts_so_far():
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = ASKED["completions"] | {"max_tokens": 12, "stream": True, "stream_options": options}
    told = [event["usage"] for event in events(post("/v1/completions", body, make=DRAFTED))]
    pairs = [tuple(each["completion_tokens_details"].values()) for each in told]
    assert pairs == [(4, 4), (8, 8), (9, 15), (9, 15)]
    assert [each["completion_tokens"] for each in told] == [5, 10, 12, 12]


@pytest.mark.parametrize("route", ASKED)
def test_a_predicted_output_is_taken_where_no_drafts_are_made(route):
    """It would change no token there either."""
    plain = post(f"/v1/{route}", ASKED[route] | {"max_tokens": 4}).json()["choices"]
    body = ASKED[route] | {"max_tokens": 4, "prediction": {"type": "content", "content": "a"}}
    assert post(f"/v1/{route}", body).json()["choices"] == plain
