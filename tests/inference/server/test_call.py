"""One call of a client: its answers are read together, and end together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from formats.errors import EngineError
from inference.requests.request import SamplingParams
from inference.server.call import Call
from inference.server.served_model import ServedModel
from tests.inference.server.fake_engine import FakeEngine, counting
from tests.inference.server.http_client import settings, tokenizer

pytestmark = pytest.mark.anyio
PROMPTS = [[65, 66], [67]]
PARAMS = SamplingParams(max_tokens=6, seed=3)


@asynccontextmanager
async def called(engine: FakeEngine) -> AsyncIterator[Call]:
    """A call for two answers to each of two prompts."""
    served = ServedModel(engine.client, settings())
    yield Call(served, PROMPTS, [PARAMS] * 2, n=2, best_of=2)
    assert not engine.client.in_flight
    served.close()


def expected() -> list[list[int]]:
    seeds = (PARAMS, PARAMS.model_copy(update={"seed": 4}))
    return [list(counting(prompt, params)) for prompt in PROMPTS for params in seeds]


async def test_answers_are_those_of_their_prompts_and_seeds():
    async with called(FakeEngine()) as call:
        answers = await call.answers()
        assert [answer.token_ids for answer in answers] == expected()
        assert [answer.text for answer in answers] == [tokenizer().decode(t) for t in expected()]
        assert [answer.finish_reason for answer in answers] == ["length"] * 4
        assert (call.usage.prompt, call.usage.completion) == (3, 24)


async def test_what_a_slow_reader_missed_is_one_delta_of_each_answer():
    engine = FakeEngine(delay=0.001)
    async with called(engine) as call:
        async with aclosing(call.deltas()) as deltas:
            await anext(deltas)
            while engine.running:
                await asyncio.sleep(0)
            places = [place async for place, _ in deltas]
        assert sorted(places) == [0, 1, 2, 3]


async def test_closing_the_deltas_ends_every_request_in_the_engine():
    engine = FakeEngine(delay=0.001)
    async with called(engine) as call:
        async with aclosing(call.deltas()) as deltas:
            await anext(deltas)
        assert sorted(engine.aborted) == ["r0", "r1", "r2", "r3"]
        assert not engine.running


async def test_one_answer_that_fails_ends_all():
    engine = FakeEngine(hold=True)
    async with called(engine) as call:
        asyncio.get_running_loop().call_later(0.01, engine.fail, "out of luck")
        with pytest.raises(EngineError, match="out of luck"):
            await call.answers()
