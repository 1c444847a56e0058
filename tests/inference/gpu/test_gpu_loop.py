"""The GPU's loop, scheduler and tensors of steps with kernels that only check what they are given.

A token follows from the ids that lie in the cache where a sequence's table says. So one that is
written, read, kept or told in a wrong place or order changes what comes after it.
"""

import pickle
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from formats.errors import EngineError
from inference.config import EngineConfig
from inference.gpu import backend, execute, runner, sizes
from inference.gpu.backend import TritonBackend
from inference.gpu.loop import DeviceLoop
from inference.gpu.sizes import Size
from inference.requests.constraint import Constraint
from inference.requests.request import SamplingParams
from inference.scheduling.active import ActiveRequest, ActiveRequests
from inference.scheduling.blocks import BlockManager, blocks_for
from inference.scheduling.scheduler import Scheduler
from inference.speculate.decoder import SpeculativeDecoder
from tests.inference.speculate.requests import Replay

V, END = 40, 0
CPU = torch.device("cpu")


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, tokens, skip_special_tokens):
        return "".join(chr(ord("a") + token % 26) for token in tokens)


def logits_after(tokens: list[int]) -> torch.Tensor:
    """Of a model that has no weights."""
    seed = 0
    for token in tokens:
        seed = (seed * 1_000_003 + token + 1) % 2**61
    return torch.rand(V, generator=torch.Generator().manual_seed(seed))


def fake_forward(model: Any, cache: Any, batch: Any) -> torch.Tensor:
    """`inference.gpu.decoder.forward` with a dict for a cache: the id in each slot."""
    count, lengths, tables = len(batch.ids), batch.lengths.tolist(), batch.tables.tolist()
    assert not batch.invariant or len(lengths) == count
    starts = range(count + 1) if batch.query_start is None else batch.query_start.tolist()
    ids, positions, slots = (t.tolist() for t in (batch.ids, batch.positions, batch.slots))
    written = [slot for slot in slots if slot >= 0]
    assert len(set(written)) == len(written), "two tokens in one place"
    cache.update((slot, token) for slot, token in zip(slots, ids, strict=True) if slot >= 0)
    logits = torch.full((count, V), 0.5)
    for s, length in enumerate(lengths):
        own = range(starts[s], starts[s + 1])
        assert s >= batch.decodes or len(own) == 1
        if length:
            tokens = [cache[tables[s][p // 64] * 64 + p % 64] for p in range(length)]
            for row, end in zip(own, range(length - len(own) + 1, length + 1), strict=True):
                assert (positions[row], ids[row]) == (end - 1, tokens[end - 1])
                logits[row] = logits_after(tokens[:end])
    return logits if batch.rows is None else logits[batch.rows]


def fake_sample(
    logits, temperature, top_k, top_p, seeds, numbers, workspace, *, log_min_p, edits
) -> torch.Tensor:
    """Greedy, or the first from a token of the seed and its number on that is not forbidden."""
    edits.check(*logits.shape)
    logits = edits.applied(logits)
    chosen = logits.argmax(1)
    least = (log_min_p.exp() * 100).round().long()
    drawn = (seeds * 7919 + numbers * 104_729 + chosen + least) % V
    turned = (drawn[:, None] + torch.arange(V)) % V
    first = (logits.gather(1, turned) > -torch.inf).int().argmax(1)
    return torch.where(temperature > 0, turned.gather(1, first[:, None])[:, 0], chosen)


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    monkeypatch.setattr(execute, "run_blocks", lambda *args: (fake_forward(*args), None))
    monkeypatch.setattr(execute, "read_logits", lambda model, rows, scales: rows)
    monkeypatch.setattr(execute, "sample", fake_sample)
    monkeypatch.setattr(execute, "workspace_on", lambda device: SimpleNamespace())
    monkeypatch.setattr(backend, "invariant_decoder", lambda model: model)


class Multiples:
    """A matcher that lets only multiples of a number come, of another one each time."""

    done = False

    def __init__(self, first: int) -> None:
        self.next = first

    def accept(self, token: int) -> bool:
        fits = token % self.next == 0
        self.next = self.next % 9 + 1
        return fits

    def mask(self, *, ends: bool = True) -> np.ndarray:
        bits = np.zeros(64, np.uint8)
        bits[:: self.next] = 1
        bits[END] = ends
        return np.packbits(bits, bitorder="little").view(np.int32)[: -(-V // 32)]

    def masks_behind(self, drafts, ends) -> list[np.ndarray]:
        now, masks = self.next, [self.mask(ends=ends[0])]
        for token, may_end in zip(drafts, ends[1:], strict=True):
            self.accept(token)
            masks.append(self.mask(ends=may_end))
        self.next = now
        return masks


def some_request(rng: random.Random, limit: int) -> tuple[list[int], SamplingParams]:
    most = rng.choice([1, 2, rng.randint(1, 80), 150, 1000])
    length = rng.choice([1, 2, 63, 64, rng.randint(1, limit - 1), limit - 1])
    kinds = [
        *[{}] * 4, *[{"temperature": 1.0, "seed": rng.randint(0, 99)}] * 3,
        *[{"logprobs": 2}, {"logprobs": 0, "temperature": 1.0, "seed": rng.randint(0, 99)}],
        {"prompt_logprobs": 1}, {"frequency_penalty": 1.0},
        {"min_tokens": min(most, rng.randint(1, 6))},
        {"min_p": 0.3, "temperature": 2.0, "seed": 5, "min_tokens": min(most, 4)},
        {"logit_bias": {END: 5.0, rng.randint(1, 9): 0.5}, "min_tokens": min(most, 9)},
        *[{"constraint": Constraint.regex(str(rng.randint(2, 9)))}] * 3,
        {"stop": (rng.choice("abc"), "de")},
    ]  # fmt: skip
    params = SamplingParams(max_tokens=most, ignore_eos=rng.random() < 0.7, **rng.choice(kinds))
    return [rng.randint(1, V - 1) for _ in range(min(length, limit - 1))], params


def make_loop(
    config: EngineConfig, rng: random.Random, shortages: float = 0.0
) -> tuple[ActiveRequests, DeviceLoop, BlockManager]:
    """A loop on the fakes."""
    assert config.kv_blocks is not None
    model: Any = SimpleNamespace(layers=[])
    cache: Any = {}
    blocks = BlockManager(config.kv_blocks)
    scheduler = Scheduler(blocks, config.max_batch_size, config.max_batched_tokens)
    active = ActiveRequests(scheduler, lambda changes: None)
    loop = TritonBackend(CPU, torch.float16).loop(model, cache, config, active)
    executor = loop.runner.executor  # a plan is all it needs: another process could have made it
    execute = executor.execute

    def copied(plan: Any) -> Any:
        if rng.random() < shortages:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return execute(pickle.loads(pickle.dumps(plan)))

    launch, batch = loop.runner.launch, scheduler.batch

    def launched(work: Any, prepared: Any = None) -> Any:
        assert work.alive().all()
        assert (batch.held[work.places] * 64 >= work.starts + work.counts).all()
        return launch(work, prepared)

    executor.execute, loop.runner.launch = copied, launched
    return active, loop, blocks


def serve(
    requests: list,
    rng: random.Random,
    config: EngineConfig,
    aborts: float = 0.0,
    shortages: float = 0.0,
    speculation: SpeculativeDecoder | None = None,
    ahead: bool = True,
) -> dict:
    """Tokens and reasons of requests that arrive when they like, by number."""
    assert config.max_model_len is not None
    active, loop, blocks = make_loop(config, rng, shortages)
    loop._ahead = ahead
    loop._scheduler.drafter = speculation
    todo, found, idle = list(enumerate(requests)), {}, 0
    gained: dict[str, list[int]] = {}
    hurry = rng.choice([0.1, 0.5, 1.0])
    while todo or active:
        while todo and (rng.random() < hurry or not active):
            number, (prompt, params) = todo.pop()
            ends = frozenset(() if params.ignore_eos else (END,))
            limit = config.max_model_len
            request = ActiveRequest(str(number), prompt, params, Letters(), ends, limit)
            if params.constraint is not None:
                request.matcher = Multiples(int(params.constraint.text))
            active.add(request)
        if active and rng.random() < aborts:
            active.finish(active[rng.choice(list(active))], "abort")
        try:
            result = loop.step()
        except EngineError as error:  # as in the engine
            result = loop.settle()
            result.finished += active.ask_for_less(error)
        idle = 0 if result else idle + 1
        assert idle < 400, "nothing goes on"
        assert len(result.names) == len(result.tokens)
        assert speculation is not None or len(set(result.names)) == len(result.names)
        for name, token in zip(result.names, result.tokens, strict=True):
            gained.setdefault(name, []).append(token)
        for output in result.finished:
            told = output.prompt_logprobs
            assert told is None or len(told) == len(output.prompt_token_ids)
            assert output.token_ids == gained.get(output.request_id, [])
            assert len(output.token_times) == len(output.token_ids)
            assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
            own = (output.token_ids, output.finish_reason, output.logprobs, told)
            found[int(output.request_id)] = own
        blocks.check()
        loop._scheduler.check()
    assert blocks.free == blocks.total
    return found


def served_alone(requests: list, rng: random.Random, limit: int) -> dict:
    """The same, of requests that run one by one, each step planned when the last one is known."""
    blocks = blocks_for(limit)
    alone = EngineConfig(max_batch_size=1, max_model_len=limit, kv_blocks=blocks, eager=True)
    return serve(requests, rng, alone, ahead=False)


def added(active: ActiveRequests, i: int, prompt: list[int], params: SamplingParams) -> None:
    active.add(ActiveRequest(str(i), prompt, params, Letters(), frozenset(), 99))


def seeds(count: int) -> list:
    """Seeds of random requests: all of them under CI, and half without."""
    few, more = range(count // 2), range(count // 2, count)
    return [*few, *(pytest.param(seed, marks=pytest.mark.ci) for seed in more)]


@pytest.mark.parametrize("seed", seeds(24))
@pytest.mark.parametrize("drafts", [False, True])
def test_requests_get_in_any_company_what_they_get_alone(seed, drafts, monkeypatch):
    """Drafts of their answers, of which some are wrong, change nothing."""
    rng = random.Random(seed + 100 * drafts)
    limit, places = rng.choice([64, 65, 129, 200, 300]), rng.choice([1, 2, 3, 5, 13])
    each = blocks_for(limit)
    monkeypatch.setattr(sizes, "MOST_TOKENS", rng.choice([16, 48, 2048]))
    count = 12 if drafts else rng.randint(1, 20)
    requests = [some_request(rng, limit) for _ in range(count)]
    crowded = EngineConfig(
        max_batch_size=places,
        invariant=seed % 3 == 0,  # then each token is a sequence of its own
        max_batched_tokens=max(
            rng.choice([1, 2, 7, 16, 64, 100, 512]), places + 1 if drafts else 1
        ),
        max_model_len=limit,
        kv_blocks=each + rng.choice([0, 1, 3, each * places]),
    )
    wanted = served_alone(requests, rng, limit)
    assert len(wanted) == len(requests)
    replay = Replay(
        [[*requests[i][0], *own[0]] for i, own in wanted.items()], 0.8, V, fewer=seed % 4 > 1
    )
    depth = rng.choice([1, 3, 8, None])
    speculation = SpeculativeDecoder(replay, places, depth) if drafts else None
    found = serve(requests, rng, crowded, aborts=0.02, speculation=speculation)
    assert found == {number: wanted[number] for number in found}
    assert speculation is None or depth is None or speculation.accepted.sum() > 0


def test_drafts_take_fewer_steps():
    """Two requests of twenty tokens, all drafts right: six tokens of each in a step."""
    config = EngineConfig(max_batch_size=2, max_model_len=99, kv_blocks=9)
    prompts = [[i + 1] * 5 for i in range(2)]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, logprobs=i or None) for i in range(2)]
    wanted = serve(list(zip(prompts, params, strict=True)), random.Random(0), config)
    active, loop, _ = make_loop(config, random.Random(0))
    texts = [[*prompts[i], *wanted[i][0]] for i in range(2)]
    loop._scheduler.drafter = SpeculativeDecoder(Replay(texts, 1.0, V), 2, 5)
    for i in range(2):
        added(active, i, prompts[i], params[i])
    gained = []
    while active:
        result = loop.step()
        gained.append(len(result.names))
        for output in result.finished:
            number = int(output.request_id)
            assert (output.token_ids, output.finish_reason) == wanted[number][:2]
            assert output.logprobs == wanted[number][2]
    assert [count for count in gained if count] == [2, 12, 12, 12, 2]


def test_steps_of_drafts_are_planned_while_the_one_before_runs(monkeypatch):
    """How many drafts come is all that is waited for, across blocks and up to where one ends."""
    config = EngineConfig(max_batch_size=3, max_model_len=300, kv_blocks=15)
    prompts = [[i + 1] * (60 + i) for i in range(3)]
    kinds = [{}, {"logprobs": 2}, {"temperature": 1.0, "seed": 4}]
    params = [SamplingParams(max_tokens=200 - i, ignore_eos=True, **k) for i, k in enumerate(kinds)]
    requests = list(zip(prompts, params, strict=True))
    wanted = serve(requests, random.Random(0), config)
    planned, launch = [], runner.GpuRunner.launch

    def noted(self, work, prepared=None):
        planned.append(prepared is not None)
        return launch(self, work, prepared)

    monkeypatch.setattr(runner.GpuRunner, "launch", noted)
    texts = [[*prompts[i], *wanted[i][0]] for i in range(3)]
    speculation = SpeculativeDecoder(Replay(texts, 0.7, V), 3, 4)
    found = serve(requests, random.Random(0), config, speculation=speculation)
    assert found == wanted
    assert planned.count(True) > 0.7 * len(planned) > 30
    assert 0 < speculation.accepted.sum() < speculation.proposed.sum()


@pytest.mark.parametrize("blocks", [20, 9])  # of 9 one gives way
def test_steps_of_the_same_requests_are_planned_once(blocks, monkeypatch):
    """Across blocks, until one ends or its biases change."""
    config = EngineConfig(max_batch_size=4, max_model_len=300, kv_blocks=blocks)
    kinds = [{}, {"temperature": 1.0, "seed": 4}, {"min_p": 0.2, "temperature": 2.0, "seed": 1}]
    requests = [
        ([i + 1] * (50 + i), SamplingParams(max_tokens=200 - i, ignore_eos=True, **own))
        for i, own in enumerate(kinds)
    ]
    late = {"logit_bias": {END: 50.0}, "min_tokens": 30}
    requests.append(([4], SamplingParams(max_tokens=90, **late)))
    wanted = served_alone(requests, random.Random(0), 300)
    assert len(wanted[3][0]) == 31, "it ends as soon as it may"
    scheduled, schedule = [], Scheduler.schedule
    monkeypatch.setattr(
        Scheduler, "schedule", lambda own, *args: scheduled.append(own) or schedule(own, *args)
    )
    assert serve(requests, random.Random(0), config) == wanted
    assert len(scheduled) < (80 if blocks == 20 else 200)


def test_who_arrives_begins_with_the_next_step():
    config = EngineConfig(max_batch_size=2, max_model_len=99, kv_blocks=9)
    active, loop, _ = make_loop(config, random.Random(0))
    added(active, 0, [1, 2], SamplingParams(max_tokens=50, ignore_eos=True))
    for step in range(1, 40):
        if step % 9 == 0:
            added(active, step, [7], SamplingParams(max_tokens=1, ignore_eos=True))
        loop.step()
        assert step % 9 or str(step) in loop.step().names


def test_warming_up_tells_what_steps_take():
    _, loop, _ = make_loop(
        EngineConfig(max_batch_size=8, max_model_len=99, kv_blocks=9), random.Random(0)
    )
    speculation = loop._scheduler.drafter = SpeculativeDecoder(Replay([], 1.0, V), 8)
    loop.runner.graphs.times = lambda: {1: 1e-3, 8: 3e-3}
    loop.warm_up()
    for times in (speculation._plain, speculation._verifying):
        assert times.of(np.array([1, 5])).tolist() == [1e-3, 3e-3]
        assert not times.learned, "no step has run"
    loop._scheduler.drafter = SpeculativeDecoder(Replay([], 1.0, V), 8, depth=4)
    loop.runner.graphs.times = lambda: pytest.fail("a depth that is given needs no times")
    loop.warm_up()


def test_graphs_hold_tables_of_adapters_until_these_move(monkeypatch):
    sizes = EngineConfig(max_batch_size=2, max_model_len=99, kv_blocks=9)
    runner = make_loop(sizes, random.Random(0))[1].runner
    captured, tables = list[Size](), SimpleNamespace(version=1)
    graph = SimpleNamespace(captured=None)
    monkeypatch.setattr(runner.graphs, "_capture", lambda size, _: captured.append(size) or graph)
    runner.graphs.enabled, runner.executor._adapters = True, tables
    runner.warm_up(2, 0)
    decodes = [Size(2), Size(1)]
    adapted = [replace(size, adapted=True) for size in decodes]
    for _ in range(2):
        assert all(runner.executor.graph_for(size) for size in (*decodes, *adapted))
        assert [size for size in captured if not size.prompts] == [*decodes, *adapted]
    tables.version = 2
    assert all(runner.executor.graph_for(size) for size in (*decodes, *adapted))
    assert captured[-2:] == adapted


@pytest.mark.parametrize("seed", seeds(6))
def test_steps_without_memory_leave_nothing_wrong_behind(seed):
    rng = random.Random(seed)
    requests = [some_request(rng, 200) for _ in range(12)]
    wanted = served_alone(requests, rng, 200)
    crowded = EngineConfig(max_batch_size=5, max_batched_tokens=64, max_model_len=200, kv_blocks=12)
    found = serve(requests, rng, crowded, shortages=0.03)
    assert set(found) == set(wanted)
    whole = {number: end for number, end in found.items() if end[1] != "error"}
    assert whole == {number: wanted[number] for number in whole}
    assert len(whole) > 2


@pytest.mark.parametrize("kind", [{}, {"logprobs": 3}, {"temperature": 1.0, "seed": 4}])
def test_the_device_has_its_next_step_before_the_host_knows_the_tokens(kind):
    """Log probabilities are told from there as well; who waits for a place changes nothing."""
    config = EngineConfig(max_batch_size=2, max_model_len=99, kv_blocks=9)
    active, loop, _ = make_loop(config, random.Random(0))
    for i, params in enumerate([kind, {}, {}]):
        asked = SamplingParams(max_tokens=20, ignore_eos=True, **params)
        added(active, i, [i + 1] * 5, asked)
    assert not loop.step(), "the first step is on its way"
    for _ in range(10):
        result = loop.step()
        assert sorted(result.names) == ["0", "1"]
        assert {name for name, _ in result.logprobs} == ({"0"} if "logprobs" in kind else set())
