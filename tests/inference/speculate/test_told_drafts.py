"""A step tells, request by request, how many drafts there were and how many of them came."""

from collections import Counter
from itertools import takewhile

from inference.engine import Engine
from inference.requests.request import SamplingParams, StepResult
from tests.inference.engines import engine_of, tokens_of
from tests.inference.speculate.requests import Replay
from tests.inference.speculate.test_traps import KINDS, ended_at

PROMPTS = {kind: [*range(42 + i, 62 + i)] for i, kind in enumerate(KINDS)}


def drafts_of(replay: Replay, text: list[int]) -> tuple[int, int]:
    """Drafts of a text, and how many of them came."""
    proposed = came = 0
    for begun, drafts in replay.drafts:
        if begun == text[: len(begun)]:
            pairs = zip(drafts, text[len(begun) :], strict=False)
            proposed += len(drafts)
            came += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return proposed, came


def run(runner: Engine, params: dict[str, SamplingParams]) -> tuple[dict[str, list[int]], list]:
    """All tokens of requests that are named by their kinds, and what each step gave."""
    for kind, one in params.items():
        runner.add_request(PROMPTS[kind], one, kind)
    steps, texts = list[StepResult](), dict[str, list[int]]()
    while runner.has_unfinished:
        steps.append(runner.advance())
        for output in steps[-1].finished:
            texts[output.request_id] = tokens_of(output)
    return texts, steps


def test_drafts_of_each_request_are_told_with_its_tokens(tiny_llama):
    """Some end with a token that is a draft, and all have drafts that are wrong."""
    runner = engine_of(tiny_llama, max_batch_size=8)
    values = {kind: own | {"max_tokens": 40, "ignore_eos": True} for kind, own in KINDS.items()}
    whole, steps = run(runner, {kind: SamplingParams(**own) for kind, own in values.items()})
    assert not any(step.drafts for step in steps)
    outputs = {kind: text[len(PROMPTS[kind]) :] for kind, text in whole.items()}
    ends = {kind: output[ended_at(output, 12)] for kind, output in outputs.items()}
    stopped = {k: SamplingParams(**own, stop_token_ids=(ends[k],)) for k, own in values.items()}
    replay = Replay(list(whole.values()), 0.8, runner.model.config.vocab_size)
    runner.speculate_by(replay, 6)
    texts, steps = run(runner, stopped)
    told, came, at_ends = Counter[str](), Counter[str](), set[str]()
    for step in steps:
        gained = Counter(step.names)
        for kind, drafts, accepted in step.drafts:
            told[kind] += drafts
            came[kind] += accepted
            at_ends |= {kind} if gained[kind] == accepted else set()
            assert gained[kind] == accepted + (kind not in at_ends)
    assert {kind: (told[kind], came[kind]) for kind in KINDS} == {
        kind: drafts_of(replay, text) for kind, text in texts.items()
    }
    assert {"greedy", "drawn and told"} <= at_ends  # by arrays, and row by row
    assert all(0 < came[kind] < told[kind] for kind in KINDS)
    own = runner.speculation
    assert (own.proposed.sum(), own.accepted.sum()) == (told.total(), came.total())


def test_a_step_that_is_split_tells_each_part_its_own_drafts():
    step = StepResult(drafts=[("a", 4, 2), ("b", 3, 0), ("a", 1, 1)])
    own, others = step.split({"a"})
    assert own.drafts == [("a", 4, 2), ("a", 1, 1)]
    assert others.drafts == [("b", 3, 0)]
    own += others
    assert sorted(own.drafts) == sorted(step.drafts)
