"""Several engines as one, before engines without a model: states, losses, queues, metrics."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from formats.errors import RequestError
from inference.requests.request import SamplingParams
from inference.server.engine_client import Overloaded, Unavailable
from inference.server.fleet import EngineFleet
from inference.server.open_requests import QueueLimits
from tests.inference.server.fake_engine import INFO, FakeEngine, Reading, counting
from tests.inference.server.http_client import talking
from tests.inference.server.test_metrics import samples

pytestmark = pytest.mark.anyio
SIZES = replace(INFO, kv_blocks=32)
LONG = list(range(200))


@dataclass
class FakeFleet:
    """Two engines without a model behind one client."""

    limits: QueueLimits = field(default_factory=QueueLimits)
    warm: bool = True

    def __post_init__(self) -> None:
        self.each = [FakeEngine(info=SIZES, limits=self.limits, warm=self.warm) for _ in range(2)]
        self.client = EngineFleet([engine.client for engine in self.each])


async def read(fleet: FakeFleet, prompt: list[int], params: SamplingParams) -> list[int]:
    with Reading(fleet.client.submit(prompt, params)) as stream:
        return [token async for delta in stream for token in delta.token_ids]


async def test_streams_of_both_have_their_own_tokens():
    fleet = FakeFleet()
    each = [SamplingParams(max_tokens=5 + i, seed=i) for i in range(20)]
    prompts = [[i] * 70 for i in range(20)]
    found = await asyncio.gather(*map(read, [fleet] * 20, prompts, each))
    assert found == list(map(counting, prompts, each))
    assert all(5 <= len(engine.sent) <= 15 for engine in fleet.each)
    assert not fleet.client.in_flight


async def test_a_reader_that_leaves_aborts_its_request_where_it_runs():
    fleet = FakeFleet()
    for engine in fleet.each:
        engine.hold = True
    streams = [fleet.client.submit([i] * 70, SamplingParams(max_tokens=400)) for i in (1, 2)]
    assert [len(engine.running) for engine in fleet.each] == [1, 1]
    streams[1].cancel()
    assert [engine.aborted for engine in fleet.each] == [[], ["r0"]]
    assert fleet.client.in_flight == 1


async def test_one_that_dies_takes_its_own_requests_along_and_the_other_goes_on(caplog):
    fleet = FakeFleet()
    sick, well = fleet.each
    sick.hold = well.hold = True
    each = (fleet.client.submit([i] * 70, SamplingParams(max_tokens=3)) for i in (1, 2))
    lost, kept = map(Reading, each)
    dead = asyncio.create_task(fleet.client.dead())
    await asyncio.sleep(0)
    sick.die("out of luck")
    delta = await anext(lost)
    assert (delta.finish_reason, delta.error) == ("abort", "out of luck")
    well.hold = False
    assert len([t async for d in kept for t in d.token_ids]) == 3
    assert (fleet.client.state, fleet.client.reason) == ("ready", None)
    assert await read(fleet, [1] * 70, SamplingParams(max_tokens=3))
    assert not dead.done()
    well.die("out of power")
    told = "engine 0 of 2: out of luck; engine 1 of 2: out of power"
    assert await dead == fleet.client.reason == told
    with pytest.raises(Unavailable, match="engine 1 of 2: out of power"):
        fleet.client.submit([1], SamplingParams())
    assert caplog.messages == ["engine 0 of 2: out of luck; the other 1 go on without it"]


async def test_all_have_to_load():
    fleet = FakeFleet(warm=False)
    waiting = asyncio.create_task(fleet.client.ready())
    dead = asyncio.create_task(fleet.client.dead())
    fleet.each[0].start()
    await asyncio.sleep(0)
    assert fleet.client.state == "starting"
    with pytest.raises(Unavailable, match="being loaded"):
        fleet.client.submit([1], SamplingParams())
    fleet.each[1].die("cuda:1: there is no such device")
    with pytest.raises(Unavailable, match="engine 1 of 2: cuda:1"):
        await waiting
    assert "engine 1 of 2: cuda:1" in await dead


def test_together_they_are_as_large_as_their_sum():
    info = FakeFleet().client.info
    assert (info.max_batch_size, info.kv_blocks, info.device) == (8, 64, "2 x cpu")


async def test_the_queue_is_full_where_both_are():
    fleet = FakeFleet(limits=QueueLimits(requests=1))
    for engine in fleet.each:
        engine.hold = True
    for _ in range(10):  # they all begin alike, and would wait at one of them
        fleet.client.submit(LONG, SamplingParams())
    assert [len(engine.running) for engine in fleet.each] == [5, 5]
    with pytest.raises(Overloaded, match="1 requests wait; 1 may"):
        fleet.client.submit(LONG, SamplingParams())
    assert sum(engine.client.measures.overloaded for engine in fleet.each) == 1


async def test_adapters_are_loaded_by_all_or_none():
    fleet = FakeFleet()
    client, (first, second) = fleet.client, fleet.each
    await client.set_adapter("sql", "adapters/sql")
    assert client.adapters == {"sql": "adapters/sql"}
    second.refuse = "adapter: its rank is too large", None
    with pytest.raises(RequestError, match="its rank"):
        await client.set_adapter("poet", "adapters/poet")
    with pytest.raises(RequestError, match="its rank"):
        await client.set_adapter("sql", None)  # the first loads it again
    for engine in fleet.each:
        assert engine.client.adapters == {"sql": "adapters/sql"}
    second.die()
    await client.set_adapter("poet", "adapters/poet")
    assert {*client.adapters} == {"sql", "poet"}
    first.die()
    with pytest.raises(Unavailable, match="engines are dead"):
        await client.set_adapter("poet", None)


async def test_a_prompt_is_known_where_it_ran_with_its_adapter():
    fleet = FakeFleet()
    await fleet.client.set_adapter("sql", "adapters/sql")
    for adapter in (None, "sql", None, "sql"):
        assert await read(fleet, LONG, SamplingParams(max_tokens=3, adapter=adapter))
    assert [dict(each) for each in fleet.client.routed] == [
        {"load": 1, "prefix": 1},
        {"load": 1, "prefix": 1},
    ]


async def test_health_and_metrics_tell_each_engine():
    async with talking(FakeFleet) as (http, fleet):
        body = {"prompt": LONG, "max_tokens": 2}
        for _ in range(3):
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        healthy = (await http.get("/health")).json()
        before = samples((await http.get("/metrics")).text)
        fleet.each[0].die("out of luck")
        degraded = await http.get("/health")
        assert degraded.status_code == 200
        after = samples((await http.get("/metrics")).text)
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        fleet.each[1].die("out of power")
        gone = await http.get("/health")
        assert gone.status_code == 503
        healthy, before, degraded, after, gone = (
            healthy,
            before,
            degraded.json(),
            after,
            gone.json()["error"]["message"],
        )
    assert healthy["status"] == "ready"
    assert [engine["state"] for engine in healthy["engines"]] == ["ready", "ready"]
    assert before["ptq:routed_requests_total by=load"] == 1
    assert before["ptq:routed_requests_total by=prefix"] == 2
    assert before["ptq:engine_ready engine=1"] == after["ptq:engine_ready engine=1"] == 1
    assert after["ptq:engine_ready"] == 0
    assert before["ptq:request_success_total finished_reason=length"] == 3
    assert before["ptq:request_success_total engine=1 finished_reason=length"] == 0
    assert degraded["status"] == "degraded"
    assert degraded["engines"][0]["reason"] == "out of luck"
    assert gone == "the engine is dead: engine 0 of 2: out of luck; engine 1 of 2: out of power"
