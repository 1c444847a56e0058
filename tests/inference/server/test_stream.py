"""The text of a stream is that of `Engine.generate`, also of a real server with stop texts."""

import asyncio

import httpx
import pytest

from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from inference.server.stream import AnswerText
from tests.inference.server.fake_engine import FakeEngine, Reading
from tests.inference.server.http_client import events
from tests.inference.server.real_server import RealServer

pytestmark = pytest.mark.anyio
PROMPT = [40, 41, 42]


@pytest.fixture(scope="module")
def engine(tiny_llama) -> Engine:
    return Engine.from_pretrained(tiny_llama, config=EngineConfig(max_batch_size=4))


def params(**values) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "temperature": 2.0, "seed": 3} | values)


def streamed(engine: Engine, asked: SamplingParams, *, slow: bool) -> tuple[list, FakeEngine]:
    """The items of a stream, each step read as it comes or all at once."""
    plain = engine.generate([PROMPT], asked.model_copy(update={"stop": ()}))[0]
    fake = FakeEngine(answer=lambda *_: list(plain.token_ids), delay=0.0)

    async def run() -> list:
        stream = fake.client.submit(PROMPT, asked)
        while slow and fake.running:
            await asyncio.sleep(0)
        stream.text = AnswerText(engine.tokenizer, asked.stop, asked.min_tokens)
        with Reading(stream) as read:
            return [delta async for delta in read]

    return asyncio.run(run()), fake


@pytest.mark.parametrize("slow", [False, True])
def test_text_and_tokens_are_those_of_generate(engine, slow):
    whole = engine.generate([PROMPT], params())[0].text
    stops = [(), (whole[4:6],), (whole[-3:],), ("no such text", whole[7:8])]
    for stop in stops:
        for least in (0, 20):
            asked = params(stop=stop, min_tokens=least, logprobs=1)
            expected = engine.generate([PROMPT], asked)[0]
            found, _ = streamed(engine, asked, slow=slow)
            assert "".join(delta.text for delta in found) == expected.text
            assert [t for delta in found for t in delta.token_ids] == list(expected.token_ids)
            assert [d.finish_reason for d in found][-1] == expected.finish_reason
            assert all(len(d.logprobs) == len(d.token_ids) for d in found)
            assert all(d.finish_reason is None for d in found[:-1])


def test_a_stop_text_ends_the_request_in_the_engine(engine):
    whole = engine.generate([PROMPT], params())[0].text
    found, fake = streamed(engine, params(stop=(whole[2:4],)), slow=False)
    assert "".join(delta.text for delta in found) == whole[: whole.find(whole[2:4])]
    assert fake.aborted == ["r0"]


def test_an_end_token_is_no_text(engine):
    ends = params(stop_token_ids=(engine.generate([PROMPT], params())[0].token_ids[9],))
    expected = engine.generate([PROMPT], ends)[0]
    found, fake = streamed(engine, ends, slow=True)
    assert "".join(delta.text for delta in found) == expected.text
    assert [delta.finish_reason for delta in found] == ["stop"]
    assert not fake.aborted


async def test_tokens_whose_text_is_held_back_come_with_the_next(engine):
    tokens = engine.tokenizer("é", add_special_tokens=False)["input_ids"]  # bytes of one character
    assert len(tokens) > 1
    fake = FakeEngine(answer=lambda *_: [*tokens, 0])
    stream = fake.client.submit(PROMPT, SamplingParams(max_tokens=9))
    stream.text = AnswerText(engine.tokenizer)
    first, last = [delta async for delta in Reading(stream)]
    assert (first.text, first.token_ids) == ("é", tokens)
    assert (last.text, last.token_ids, last.finish_reason) == ("", [0], "stop")


@pytest.mark.parametrize("end", [[], [0]])
async def test_a_text_that_is_complete_without_an_end_token_is_told_whole(engine, end):
    tokens = engine.tokenizer("{}", add_special_tokens=False)["input_ids"]
    fake = FakeEngine(answer=lambda *_: [*tokens, *end])
    stream = fake.client.submit(PROMPT, SamplingParams(max_tokens=9))
    stream.text = AnswerText(engine.tokenizer, ends={0})
    found = [delta async for delta in Reading(stream)]
    assert "".join(delta.text for delta in found) == "{}"
    assert found[-1].finish_reason == "stop"


@pytest.mark.parametrize("seed", range(4))
def test_a_stop_text_ends_a_served_text_wherever_tokens_begin(server: RealServer, seed: int):
    def complete(**more):
        body = {"prompt": "def add", "max_tokens": 40, "temperature": 1.5, "seed": seed} | more
        return httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)

    whole = complete(ignore_eos=True, return_token_ids=True).json()["choices"][0]
    text, count = whole["text"], len(whole["token_ids"])
    assert count == 40
    for begin in (0, len(text) // 3, len(text) // 2):
        stop = text[begin : begin + 5]
        more = {"ignore_eos": True, "stop": ["\ue000", stop]}
        answer = complete(**more)
        choice = answer.json()["choices"][0]
        assert choice["text"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
        stream = complete(**more, stream=True, stream_options={"include_usage": True})
        *parts, last = events(stream)
        assert "".join(part["choices"][0]["text"] for part in parts) == choice["text"]
        assert parts[-1]["choices"][0]["finish_reason"] == "stop"
        assert last["usage"] == answer.json()["usage"]
