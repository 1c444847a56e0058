"""The engine as the HTTP process sees it: streams, limits, errors, draining."""

import asyncio

import pytest

from formats.errors import RequestError
from inference.requests.request import SamplingParams
from inference.server.engine_client import EngineClient, Overloaded, Unavailable
from inference.server.open_requests import QueueLimits
from tests.inference.server.fake_engine import INFO, FakeEngine, Reading, counting

pytestmark = pytest.mark.anyio
PARAMS = SamplingParams(max_tokens=5)
PROMPT = [1, 2, 3]


async def read(client: EngineClient, params: SamplingParams = PARAMS) -> list[int]:
    with Reading(client.submit(PROMPT, params)) as stream:
        return [token async for delta in stream for token in delta.token_ids]


async def test_a_stream_has_the_tokens_of_its_request_and_ends():
    engine = FakeEngine()
    seeds = range(9)
    each = [SamplingParams(max_tokens=5 + seed, seed=seed) for seed in seeds]
    found = await asyncio.gather(*(read(engine.client, params) for params in each))
    assert found == [counting(PROMPT, params) for params in each]
    assert not engine.client.in_flight
    assert not engine.aborted


async def test_what_a_slow_reader_missed_is_one_item():
    engine = FakeEngine()
    params = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1)
    with Reading(engine.client.submit(PROMPT, params)) as stream:
        while engine.running:
            await asyncio.sleep(0)
        (delta,) = [delta async for delta in stream]
    assert delta.token_ids == counting(PROMPT, params)
    assert delta.finish_reason == "length"
    assert [next(iter(found)) for found in delta.logprobs] == delta.token_ids
    assert delta.prompt_logprobs == [None, {2: -0.5}, {3: -0.5}]


async def test_a_reader_that_leaves_aborts_its_request_once():
    engine = FakeEngine(delay=0.001)
    with Reading(engine.client.submit(PROMPT, SamplingParams(max_tokens=400))) as stream:
        await anext(stream)
        stream.cancel()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    reader = asyncio.create_task(read(engine.client, SamplingParams(max_tokens=400)))
    await asyncio.sleep(0.01)
    reader.cancel()
    await asyncio.wait([reader])
    assert engine.aborted == ["r0", "r1"]
    assert not engine.running
    assert not engine.client.in_flight


async def test_beyond_the_queue_a_request_is_refused_with_the_seconds_to_wait():
    engine = FakeEngine(hold=True, limits=QueueLimits(requests=2))
    streams = [engine.client.submit(PROMPT, PARAMS) for _ in range(INFO.max_batch_size + 2)]
    with pytest.raises(Overloaded, match="2 requests wait; 2 may") as error:
        engine.client.submit(PROMPT, PARAMS)
    assert 1 <= error.value.retry_after <= 60
    streams[0].cancel()
    engine.client.submit(PROMPT, PARAMS)


async def test_beyond_the_queued_tokens_a_request_is_refused_but_a_long_one_alone_is_taken():
    engine = FakeEngine(hold=True, limits=QueueLimits(tokens=100))
    first = Reading(engine.client.submit([1] * 200, PARAMS))
    with pytest.raises(Overloaded, match="prompts of 200 tokens wait"):
        engine.client.submit(PROMPT, PARAMS)
    engine.hold = False
    await anext(first)  # it has a token: it waits no more
    engine.client.submit(PROMPT, PARAMS)


async def test_prompts_that_the_model_cannot_take_are_refused_at_once():
    client = FakeEngine().client
    for prompt, fault in (([], "empty"), ([1] * 512, "no room"), ([384], "vocabulary")):
        with pytest.raises(RequestError, match=fault):
            client.submit(prompt, PARAMS)
    with pytest.raises(RequestError, match="stop_token_ids"):
        client.submit(PROMPT, SamplingParams(stop_token_ids=(384,)))
    assert not client.in_flight


async def test_what_the_engine_refuses_is_raised_when_the_stream_is_read():
    engine = FakeEngine(refuse=("constraint: no such grammar", "response_format"))
    stream = Reading(engine.client.submit(PROMPT, PARAMS))
    with pytest.raises(RequestError, match="no such grammar") as error:
        await anext(stream)
    assert error.value.param == "response_format"
    assert not engine.client.in_flight
    assert not engine.aborted


async def test_a_failed_step_ends_its_requests_and_the_next_are_answered():
    engine = FakeEngine(hold=True)
    streams = [Reading(engine.client.submit(PROMPT, PARAMS)) for _ in range(3)]
    engine.fail("out of luck")
    for stream in streams:
        delta = await anext(stream)
        assert (delta.finish_reason, delta.error) == ("error", "out of luck")
    engine.hold = False
    assert await read(engine.client) == counting(PROMPT, PARAMS)


async def test_a_dead_engine_ends_every_stream_and_takes_no_more():
    engine = FakeEngine(hold=True)
    stream = Reading(engine.client.submit(PROMPT, PARAMS))
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    engine.die("killed")
    delta = await reader
    assert (delta.finish_reason, delta.error) == ("abort", "killed")
    assert engine.client.state == "dead"
    assert await engine.client.dead() == "killed"
    with pytest.raises(Unavailable, match="killed"):
        engine.client.submit(PROMPT, PARAMS)


async def test_while_it_loads_nothing_is_taken():
    engine = FakeEngine(warm=False)
    with pytest.raises(Unavailable, match="being loaded"):
        engine.client.submit(PROMPT, PARAMS)
    waiting = asyncio.create_task(engine.client.ready())
    await asyncio.sleep(0)
    engine.start()
    assert await waiting is INFO


async def test_draining_lets_what_runs_end_and_refuses_the_rest():
    engine = FakeEngine(delay=0.002)
    reader = asyncio.create_task(read(engine.client))
    await asyncio.sleep(0)
    drained = asyncio.create_task(engine.client.drain(10))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="stopping"):
        engine.client.submit(PROMPT, PARAMS)
    await drained
    assert await reader == counting(PROMPT, PARAMS)


async def test_draining_ends_what_takes_too_long():
    engine = FakeEngine(hold=True)
    stream = Reading(engine.client.submit(PROMPT, PARAMS))
    await engine.client.drain(0.01)
    delta = await anext(stream)
    assert (delta.finish_reason, delta.error) == ("abort", "the server is stopping")
    assert engine.aborted == ["r0"]
