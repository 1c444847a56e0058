"""A real engine in a process of its own, without HTTP before it."""

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass

import pytest

from formats.errors import RequestError
from inference.beam_search import BeamParams, beam_search
from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from inference.server.engine.process import EngineProcess, EngineSource
from inference.server.engine_client import EngineClient, Unavailable
from tests.inference.server.fake_engine import Reading

SIZES = EngineConfig(max_batch_size=4, kv_blocks=16, max_batched_tokens=64)


@dataclass
class Served:
    """A process, its client, and the loop that they live on."""

    process: EngineProcess
    client: EngineClient
    runner: asyncio.Runner

    def run(self, work):
        return self.runner.run(asyncio.wait_for(work, 60))


@pytest.fixture(scope="module")
def engine(tiny_llama):
    with asyncio.Runner() as runner:
        process = EngineProcess(EngineSource(tiny_llama, SIZES))
        client = EngineClient(process.send)
        runner.run(process.connect(client))
        found = Served(process, client, runner)
        found.run(client.ready())
        yield found
        runner.run(disconnect(process))
        process.end(5)


async def disconnect(process: EngineProcess) -> None:
    process.disconnect()


async def read(client: EngineClient, prompt: list[int], params: SamplingParams) -> list[int]:
    with Reading(client.submit(prompt, params)) as stream:
        return [token async for delta in stream for token in delta.token_ids]


async def idle(client: EngineClient) -> None:
    async with asyncio.timeout(5):
        while client.stats.running or client.stats.waiting:
            await asyncio.sleep(0.005)


def test_answers_are_those_of_the_engine_while_others_leave(engine, tiny_llama):
    """Of 60 clients a third leave at random; what the others get is right, and no block is lost."""
    client, chance = engine.client, random.Random(0)
    prompts = [[40 + i, 41, 42, *range(60, 60 + i)] for i in range(60)]
    each = [
        SamplingParams(max_tokens=12 + i % 9, temperature=i % 3, seed=i)
        for i in range(len(prompts))
    ]

    async def leave(prompt: list[int], params: SamplingParams) -> None:
        with Reading(
            client.submit(prompt, params.model_copy(update={"max_tokens": 300}))
        ) as stream:
            if chance.random() < 0.7:
                await anext(stream)

    async def all_of_them() -> list:
        work = [(leave if i % 3 == 2 else read) for i in range(len(prompts))]
        tasks = [
            leave(prompts[i], each[i]) if one is leave else read(client, prompts[i], each[i])
            for i, one in enumerate(work)
        ]
        found = await asyncio.gather(*tasks)
        await idle(client)
        return found

    found = engine.run(all_of_them())
    own = Engine.from_pretrained(tiny_llama, config=SIZES)
    expected = own.generate(prompts, each)
    for i, output in enumerate(expected):
        assert found[i] == (None if i % 3 == 2 else list(output.token_ids))
    stats = client.stats
    assert stats.blocks.used == 0
    assert stats.blocks.free + stats.blocks.cached == stats.blocks.total == 16
    assert not client.in_flight


def test_a_reader_that_leaves_frees_its_blocks_within_a_step(engine):
    async def leave() -> float:
        with Reading(engine.client.submit([1] * 100, SamplingParams(max_tokens=300))) as stream:
            await anext(stream)
            assert engine.client.stats.blocks.used >= 2
        start = time.perf_counter()
        while engine.client.stats.blocks.used:
            await asyncio.sleep(0.001)
        return time.perf_counter() - start

    assert engine.run(leave()) < 1


def test_a_reader_that_does_not_read_holds_nobody_up(engine):
    async def run() -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        slow = Reading(engine.client.submit([5, 6], params))
        await read(engine.client, [7, 8], SamplingParams(max_tokens=250, ignore_eos=True))
        await idle(engine.client)
        (delta,) = [delta async for delta in slow]
        assert len(delta.token_ids) == 200
        assert delta.finish_reason == "length"

    engine.run(run())


def test_beams_are_those_of_the_engine(engine, tiny_llama):
    params = BeamParams(beam_width=3, n=2, max_tokens=8)
    found = engine.run(engine.client.beam([40, 41], params))
    own = Engine.from_pretrained(tiny_llama, config=SIZES)
    assert found == beam_search(own, [[40, 41]], params)[0]

    async def leave() -> None:
        search = asyncio.create_task(
            engine.client.beam([40, 41], BeamParams(beam_width=3, max_tokens=250, ignore_eos=True))
        )
        while not engine.client.stats.running:
            await asyncio.sleep(0.001)
        search.cancel()
        await asyncio.wait([search])
        await idle(engine.client)

    engine.run(leave())
    assert engine.client.stats.blocks.used == 0
    assert not engine.client.in_flight
    with pytest.raises(RequestError, match="beam"):
        engine.run(engine.client.beam([40], BeamParams(beam_width=30)))


def test_it_tells_what_engine_it_is(engine):
    info = engine.client.info
    assert (info.max_model_len, info.vocab_size, info.kv_blocks) == (512, 384, 16)
    assert (info.device, info.quantization, info.kv_cache) == ("cpu", "float", "float32")


def test_a_killed_engine_is_noticed_at_once(engine):
    """The last test: it ends the engine that the others share."""
    client, process = engine.client, engine.process

    async def kill() -> float:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        stream = Reading(client.submit([5, 6], params))
        await anext(stream)
        start = time.perf_counter()
        os.kill(process._process.pid, signal.SIGKILL)
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason == "abort"
        assert "died with exit code -9" in deltas[-1].error
        with pytest.raises(Unavailable, match="exit code -9"):
            client.submit([5], SamplingParams())
        return time.perf_counter() - start

    assert engine.run(kill()) < 1
