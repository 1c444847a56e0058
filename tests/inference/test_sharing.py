"""Requests that come, fork, leave and are preempted as they like, over a cache that is too small."""

import random
import time

import pytest

from inference.engine import Engine
from inference.requests.request import SamplingParams
from tests.inference.engines import engine_of, ids


class Client:
    """Sends what it likes, chooses the tokens of held requests, and keeps all that it got.

    Args:
        engine: Answers.
        rng: Decides.
    """

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine, self.rng, self.count = engine, rng, 0
        self.held: dict[str, tuple[list[int], list[int], int]] = {}  # beginning, chosen, most
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.got: list[tuple[list[int], SamplingParams, list[int]]] = []

    def prompt(self) -> list[int]:
        """One of three beginnings, of some length, and an end of its own."""
        rng = self.rng
        stem = ids(64 * rng.randint(0, 3) + rng.choice([0, 0, 20]), rng.choice([1, 2, 3]))
        return [*stem, *ids(rng.randint(1, 30), rng.randint(10, 20))]

    def ask(self) -> None:
        """A new request."""
        self.count += 1
        name, prompt = str(self.count), self.prompt()
        if self.rng.random() < 0.3:
            self.engine.hold(prompt, top=2, beams=1, max_tokens=40, request_id=name)
            self.held[name] = prompt, [], 25
            return
        most, logprobs = self.rng.randint(1, 70), self.rng.choice([None, 2])
        params = SamplingParams(max_tokens=most, ignore_eos=True, logprobs=logprobs)
        self.engine.add_request(prompt, params, name)
        self.asked[name] = prompt, params

    def leave(self) -> None:
        """A request is given up."""
        names = sorted({*self.held, *self.asked})
        if names:
            name = self.rng.choice(names)
            output = self.engine.abort(name)
            assert output is not None
            assert output.finish_reason == "abort"
            self.held.pop(name, None)
            self.asked.pop(name, None)

    def step(self) -> None:
        """A step, and what follows of it."""
        result = self.engine.advance()
        for output in result.finished:
            prompt, params = self.asked.pop(output.request_id)
            self.got.append((prompt, params, list(output.token_ids)))
        for name, likely in result.candidates.items():
            self.choose(name, *list(likely)[:2])

    def choose(self, name: str, best: int, second: int) -> None:
        """Go on with the likeliest token; perhaps with the other one, too."""
        prompt, made, most = self.held[name]
        if self.rng.random() < 0.15 and len(self.held) < 5 and len(made) < most - 2:
            self.count += 1
            new, start = str(self.count), [*prompt, *made, second]
            self.engine.fork(name, new, second)
            self.held[new] = start, [], most - len(made) - 1
        made.append(best)
        if len(made) == most:
            self.engine.abort(name)
            del self.held[name]
            params = SamplingParams(max_tokens=len(made), ignore_eos=True)
            self.got.append((prompt, params, made))
        else:
            self.engine.extend(name, best)


@pytest.mark.parametrize("scheme", ["float", "a8w8c8", "a8w8_dynamic"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_shared_everyone_gets_what_he_gets_alone(
    tiny_llama, make_quantized, seed, scheme
):
    rng, folder = random.Random(seed), make_quantized(tiny_llama, scheme)
    sizes = {"kv_blocks": 8, "max_batch_size": 5, "max_batched_tokens": [8, 40, 150, 600][seed]}
    engine = engine_of(folder, max_model_len=330, **sizes)
    alone = engine_of(folder, max_model_len=330, prefix_cache=False)
    client = Client(engine, rng)
    for _ in range(160):
        if rng.random() < 0.3 and len(client.held) + len(client.asked) < 8:
            client.ask()
        if rng.random() < 0.04:
            client.leave()
        client.step()
        engine.check_integrity()
        stats = engine.stats()
        assert stats.free + stats.used + stats.cached == stats.total == 8
    idle = 0
    while engine.has_unfinished:
        before = len(client.got)
        client.step()
        engine.check_integrity()
        idle = 0 if len(client.got) > before else idle + 1
        assert idle < 300, "nothing goes on"
    assert engine.stats().used == 0
    assert not client.held
    assert not client.asked
    assert len(client.got) > 12
    assert engine.stats().hit_tokens > 0
    assert engine.stats().preemptions > 1
    wanted = alone.generate([prompt for prompt, _, _ in client.got], [p for _, p, _ in client.got])
    assert [list(o.token_ids) for o in wanted] == [tokens for _, _, tokens in client.got]


def test_a_wanted_time_between_tokens_cuts_prompts_and_changes_no_token(tiny_llama):
    hurried, calm = (
        engine_of(tiny_llama, max_model_len=330, target_itl_ms=0.01),
        engine_of(tiny_llama, max_model_len=330),
    )
    params = SamplingParams(max_tokens=25, ignore_eos=True, logprobs=2)
    outputs = []
    for engine in (hurried, calm):
        first = engine.add_request(ids(20, 0), params)
        engine.step()
        second = engine.add_request(ids(300, 1), params)
        steps = 0
        while not (told := engine.advance()).names.count(second):
            assert first in told.names, "it has a token in every step"
            steps += 1
        assert steps == (300 // 16 if engine is hurried else 0)
        engine.abort(first)
        outputs.append([engine.abort(second), *engine.generate([ids(310, 2)], params)])
    (mine, again), (other, wanted) = outputs
    assert mine.logprobs == other.logprobs
    assert again.logprobs == wanted.logprobs


def first_token_s(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds until the first token of a prompt, and that token."""
    start = time.perf_counter()
    output = next(engine.stream(prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
    return time.perf_counter() - start, output.token_ids[0]


def test_behind_a_shared_system_prompt_the_first_token_comes_at_once(make_model):
    folder = make_model("llama", max_position_embeddings=4096)
    engine, cold = (engine_of(folder, prefix_cache=on) for on in (True, False))
    ratios = []
    for seed in range(3):
        system = ids(2048, seed)
        miss = first_token_s(engine, [*system, *ids(40, 50 + seed)])
        hit = first_token_s(engine, [*system, *ids(40, 60 + seed)])
        assert hit[1] == first_token_s(cold, [*system, *ids(40, 60 + seed)])[1]
        ratios.append(miss[0] / hit[0])
    assert max(ratios) >= 8, ratios
    prompt, params = [*system, *ids(30, 70)], SamplingParams(max_tokens=20, logprobs=3)
    assert (
        engine.generate([prompt], params)[0].logprobs == cold.generate([prompt], params)[0].logprobs
    )
    assert engine.stats().hit_tokens == 4 * 2048


def test_a_step_tells_what_the_cache_held_of_requests_that_begin(tiny_llama):
    engine, found = engine_of(tiny_llama), []
    for prompt in (ids(130), ids(150), ids(10)):
        name = engine.add_request(prompt, SamplingParams(max_tokens=3))
        steps = [engine.advance().found for _ in range(4)]
        found.append(steps[0].pop(name))
        assert not any(steps)
    assert found == [0, 128, 0]
