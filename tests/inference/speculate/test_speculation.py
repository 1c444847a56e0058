"""Speculation: no token, log probability, text or reason changes, whatever is drafted."""

from collections.abc import Callable

import numpy as np
import pytest

from formats.errors import EngineError
from inference.config import SpeculateConfig
from inference.cpu.backend import CpuBackend
from inference.engine import Engine
from inference.requests.request import RequestOutput, SamplingParams
from inference.speculate.decoder import MOST_DEPTH, SpeculativeDecoder
from inference.speculate.estimates import StepTime
from tests.inference.engines import engine_of, tokens_of
from tests.inference.speculate.requests import Replay, all_tokens, run_all, some_requests


@pytest.mark.parametrize(
    ("scheme", "depth", "chance", "config"),
    [
        ("float", 4, 1.0, {}),
        ("a8w8c8", 7, 0.7, {"max_batch_size": 3, "kv_blocks": 12, "max_model_len": 256}),
        ("a8w8_dynamic", 2, 0.0, {"max_batched_tokens": 9}),
        ("a8w4c4_two_level", None, 0.8, {"prefix_cache": False}),
    ],
)
def test_nothing_changes(tiny_llama, make_quantized, scheme, depth, chance, config):
    """PTQ_SPECULATED_REQUESTS in the environment asks for another number of requests."""
    folder = make_quantized(tiny_llama, scheme)
    requests = some_requests()
    runner = engine_of(folder, **config)
    texts, wanted = all_tokens(runner, requests), run_all(runner, requests)
    replay = Replay(texts, chance, runner.model.config.vocab_size)
    runner.speculate_by(replay, depth)
    assert run_all(runner, requests) == wanted
    own = runner.speculation
    assert own.proposed.sum() > 0
    assert replay.ended == len(requests)
    share = own.accepted[0] / own.proposed[0]  # some outputs begin alike and go on otherwise
    assert abs(share - chance) < 0.3


@pytest.fixture(scope="module")
def plain(tiny_llama):
    """Requests, and what an engine without drafts answers."""
    requests = some_requests(seed=1)
    return requests, run_all(engine_of(tiny_llama), requests)


@pytest.mark.parametrize(
    ("method", "depth", "config"),
    [
        ("ngram", 5, {"max_batch_size": 4, "kv_blocks": 14, "max_model_len": 256}),
        ("suffix", None, {}),
        ("draft", 3, {"max_batched_tokens": 70}),
    ],
)
def test_no_method_changes_anything(tiny_llama, make_quantized, plain, method, depth, config):
    """As above; of the draft model's drafts most come, since it is the model in int4."""
    path = str(make_quantized(tiny_llama, "a8w4")) if method == "draft" else None
    requests, wanted = plain
    own = SpeculateConfig(method=method, path=path, depth=depth)
    runner = engine_of(tiny_llama, speculate=own, **config)
    assert run_all(runner, requests) == wanted
    assert run_all(runner, requests) == wanted  # what was served before is known now
    assert runner.speculation.accepted.sum() > 0


def knowing(
    folder, tokens: int, chance: float = 1.0, depth: int | None = None, **config
) -> tuple[Engine, SamplingParams, RequestOutput]:
    """An engine that drafts the answer to "def f", parameters and that answer."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    runner = engine_of(folder, **config)
    (wanted,) = runner.generate(["def f"], params)
    runner.speculate_by(Replay([tokens_of(wanted)], chance, 100), depth)
    return runner, params, wanted


def test_steps_are_as_few_as_drafts_allow(tiny_llama):
    runner, params, _ = knowing(tiny_llama, 25, depth=5)
    name, steps, most = runner.add_request("def f", params), 0, 0
    while runner.has_unfinished:
        result = runner.advance()
        steps, most = steps + 1, max(most, result.names.count(name))
    assert steps == 1 + 4  # a token of the prompt's step, then six a step
    assert most == 6


def test_what_prompts_leave_is_drafted_and_no_more(tiny_llama):
    runner, params, _ = knowing(tiny_llama, 40, depth=9, max_batched_tokens=6)
    works = []
    schedule = runner._scheduler.schedule
    runner._scheduler.schedule = lambda: works.append(schedule()) or works[-1]
    runner.add_request("def f", params)
    runner.advance()
    runner.add_request("y = 1\n" * 30, SamplingParams(max_tokens=2))
    while runner.has_unfinished:
        runner.advance()
    assert max(work.tokens for work in works) == 6
    assert {int(work.drafts.sum()) for work in works if work.prompt_tokens} == {0}
    assert max(int(work.drafts.sum()) for work in works) == 5


def test_drafts_take_no_block_that_another_needs(tiny_llama):
    """Two requests that just fit: with drafts neither gives way to the other."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    config = {"max_batch_size": 2, "kv_blocks": 4, "max_model_len": 128, "prefix_cache": False}
    runner = engine_of(tiny_llama, **config)
    prompts = [[5] * 60, [6] * 60]
    wanted = runner.generate(prompts, params)
    assert runner.stats().preemptions == 0
    texts = [tokens_of(output) for output in wanted]
    runner.speculate_by(Replay(texts, 0.9, 100), depth=8)
    again = runner.generate(prompts, params)
    assert [o.token_ids for o in again] == [o.token_ids for o in wanted]
    assert runner.stats().preemptions == 0


def pretend(
    runner: Engine,
    step: Callable[[int], float] = lambda rows: 1e-3 + 2e-5 * rows,
    drafting: Callable[[int], float] = lambda longest: 1e-6,
) -> SpeculativeDecoder:
    """Have steps of so many rows, and chains of so many drafts, take other times than they do."""
    found = runner.speculation
    kinds = (found._plain, step), (found._verifying, step), (found._drafting, drafting)
    for times, seconds in kinds:
        times.note = _instead(times.note, seconds)
    note = found.note_time
    found.note_time = lambda work, _: note(work, step(work.tokens))  # what trials are paid by
    return found


def _instead(
    note: Callable[[int, float], None], seconds: Callable[[int], float]
) -> Callable[[int, float], None]:
    return lambda rows, _: note(rows, seconds(rows))


def test_a_depth_is_chosen_that_pays(tiny_llama):
    """Drafts that never come are hardly ever made; those that always come are long chains."""
    computed = []
    for chance in (0.0, 1.0):
        runner, params, _ = knowing(tiny_llama, 300, chance)
        computed.append(pretend(runner))
        runner.generate(["def f"], params)
    assert computed[0].proposed.sum() < 280
    assert computed[0].steps < 75
    assert computed[1].accepted.sum() > 240
    assert computed[1].steps < 50
    assert len(computed[1].proposed) == MOST_DEPTH


def test_what_costs_more_than_a_step_is_left_out(tiny_llama):
    """Drafts that always come, each made more slowly than the model itself would."""
    runner, params, wanted = knowing(tiny_llama, 120)
    found = pretend(runner, drafting=lambda longest: 0.01 * longest)
    assert runner.generate(["def f"], params)[0].token_ids == wanted.token_ids
    assert 0 < found.steps < 8


def test_a_pause_while_drafts_are_made_does_not_end_them(tiny_llama):
    """The machine is away for a second, at any of the first times; all others take no time."""
    for paused in (1, 2, 3):
        runner, params, _ = knowing(tiny_llama, 120)
        calls = []

        def seconds(longest: int, calls: list[int] = calls, paused: int = paused) -> float:
            calls.append(longest)
            return 1.0 if len(calls) == paused else 1e-6

        pretend(runner, drafting=seconds)
        runner.generate(["def f"], params)
        assert max(calls[4:]) > 4


def test_steps_with_drafts_that_take_longer_are_known_for_it(tiny_llama):
    """A step with drafts takes three times as long, as where a device is waited for: one token
    more a step would not pay, four do."""
    accepted = []
    for chance in (0.55, 1.0):
        runner, params, _ = knowing(tiny_llama, 300, chance)
        found = pretend(runner)
        found._verifying.note = _instead(
            type(found._verifying).note.__get__(found._verifying), lambda rows: 3e-3
        )
        runner.generate(["def f"], params)
        accepted.append(found.accepted.sum() / 300)
    assert accepted[0] < 0.2
    assert accepted[1] > 0.7


def test_what_a_step_takes_is_known_by_its_size():
    """A GPU's steps are padded: 33 rows take what 48 take."""
    times, rng = StepTime(), np.random.default_rng(0)
    for _ in range(400):
        rows = int(rng.integers(1, 130))
        padded = next(n for n in (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128, 192) if n >= rows)
        times.note(rows, (4e-3 + 1e-4 * padded) * rng.uniform(0.95, 1.05))
    assert times.of(33) == times.of(48) == pytest.approx(8.8e-3, rel=0.05)
    assert times.of(np.array([64.5, 96.0])) == pytest.approx([13.6e-3] * 2, rel=0.05)
    before = times.of(2)
    times.note(2, 50.0)
    assert times.of(2) == before


def test_sizes_that_never_ran_lie_between_those_that_did():
    times = StepTime()
    for rows, seconds in ((4, 1e-3), (16, 4e-3)) * 2:
        times.note(rows, seconds)
    assert times.of(8) == pytest.approx(2e-3)
    assert times.of(1) == pytest.approx(1e-3)
    assert 4e-3 < times.of(32) < 8e-3
    assert times.least(32) == pytest.approx(4e-3)


def test_sizes_that_never_ran_take_what_was_told_times_what_others_took_more():
    times = StepTime()
    times.tell({1: 2e-3, 8: 2.2e-3, 16: 4e-3})
    assert times.of(np.array([1, 3, 8, 12])) == pytest.approx([2e-3, 2.2e-3, 2.2e-3, 4e-3])
    for _ in range(2):
        times.note(8, 3.3e-3)
    assert times.of(np.array([1, 8, 16])) == pytest.approx([3e-3, 3.3e-3, 6e-3])
    assert times.least(64) == pytest.approx(6e-3)
    assert times.of(24) > times.of(16)
    assert times.of(32) == pytest.approx(11.4e-3)  # as 8 to 16 grow, on and on


@pytest.mark.parametrize("first", [5.0, 1e-6])
def test_one_step_alone_is_not_believed(first):
    times = StepTime(1.0)
    times.note(1, first)
    assert not times.learned
    assert times.of(1) == 1.0
    times.note(1, 4e-3)
    assert times.of(1) == min(first, 4e-3)


def test_bad_configurations_are_refused():
    with pytest.raises(EngineError, match="method draft needs a path"):
        SpeculateConfig(method="draft")
    with pytest.raises(EngineError, match="method ngram takes no path; found 'x'"):
        SpeculateConfig(method="ngram", path="x")


def test_a_backend_that_runs_no_drafter_says_so(tiny_llama, monkeypatch):
    """Before the path of the drafter, or the weights of the model, are looked at."""
    monkeypatch.setattr(CpuBackend, "runs_drafters", False)
    own = SpeculateConfig(method="draft", path="nowhere")
    with pytest.raises(
        EngineError, match="found draft.* of several ranks drafts by ngram or suffix"
    ):
        engine_of(tiny_llama, speculate=own)
    assert engine_of(tiny_llama, speculate=SpeculateConfig(method="ngram")).speculation is not None
