"""Requests of every kind, and a proposer that knows what they will say."""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from formats.errors import RequestError
from inference.engine import Engine
from inference.proposers import Proposer
from inference.requests.constraint import Constraint
from inference.requests.request import RequestOutput, SamplingParams
from inference.scheduling.batch import Ints, RunningBatch
from inference.speculate.counts import DraftCounts
from tests.inference.engines import tokens_of

TEXTS = (
    "def add(a, b):\n",
    "class Node:\n",
    "import os\n\nfor name in",
    "x",
    "    return self.value" * 6,
    "print(1 + 2)\n" * 12,
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}


def request_count(usual: int = 40) -> int:
    """How many requests a comparison has: PTQ_SPECULATED_REQUESTS of the environment says so."""
    return int(os.environ.get("PTQ_SPECULATED_REQUESTS", usual))


class Proposing(Proposer):
    """A proposer whose drafts follow from the text alone.

    Attributes:
        drafts: The texts that it drafted for, as far as they were known, and what it drafted.
        ended: How many requests have ended.
    """

    def __init__(self) -> None:
        self.ended = 0
        self.drafts: list[tuple[list[int], list[int]]] = []

    def after(self, text: list[int], most: int) -> list[int]:
        """What is drafted after a text, so many tokens at most."""
        raise NotImplementedError

    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        counts = np.zeros_like(places)
        for i, (place, count) in enumerate(zip(places.tolist(), most.tolist(), strict=True)):
            known = int(batch.known[place])
            text = batch.ids[place, :known].tolist()
            drafts = self.after(text, count)
            batch.ids[place, known : known + len(drafts)] = drafts
            counts[i] = len(drafts)
            self.drafts.append((text, drafts))
        return counts

    def note_end(self, tokens: Sequence[int], prompt: int) -> None:
        self.ended += 1

    @property
    def proposed(self) -> int:
        return sum(len(drafts) for _, drafts in self.drafts)


class Replay(Proposing):
    """Drafts of outputs that are known, some of them wrong.

    Args:
        outputs: All tokens of requests, prompts included; found again by their beginnings.
        chance: Probability that a draft is right, where all before it are.
        vocabulary: Of wrong tokens.
        fewer: Whether there are often fewer drafts than are asked for.
    """

    def __init__(
        self,
        outputs: Sequence[Sequence[int]],
        chance: float,
        vocabulary: int,
        *,
        fewer: bool = False,
    ) -> None:
        super().__init__()
        self._outputs, self._chance, self._vocabulary = list(outputs), chance, vocabulary
        self._random, self._fewer = random.Random(0), fewer

    def after(self, text: list[int], most: int) -> list[int]:
        known = len(text)
        found = next((o for o in self._outputs if list(o[:known]) == text), [])
        count = self._random.randint(0, most) if self._fewer else most
        return [
            token if self._random.random() < self._chance else self._wrong(token)
            for token in found[known : known + count]
        ]

    def reached_behind(self, length: int) -> bool:
        """Whether drafts stood behind the last of so many tokens of a text, in one step with it."""
        return any(len(text) < length < len(text) + len(own) for text, own in self.drafts)

    def _wrong(self, token: int) -> int:
        return (token + 1 + self._random.randrange(self._vocabulary - 1)) % self._vocabulary


def spied(runner: Engine) -> list[tuple[list[int], list[int]]]:
    """Texts and what is drafted after them, from now on."""
    assert runner.speculation is not None
    proposer, seen = runner.speculation.proposer, []
    propose = proposer.propose

    def noted(batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        counts = propose(batch, places, most)
        for place, count in zip(places.tolist(), counts.tolist(), strict=True):
            known = int(batch.known[place])
            tokens = batch.ids[place, : known + count].tolist()
            seen.append((tokens[:known], tokens[known:]))
        return counts

    proposer.propose = noted
    return seen


def some_params(rng: random.Random, *, constrained: bool = True) -> SamplingParams:
    """Parameters of a request, of any kind."""
    values: dict = {"max_tokens": rng.choice((1, 2, 7, 20, 40)), "seed": rng.randrange(2**40)}
    if rng.random() < 0.6:
        values["temperature"] = rng.choice((0.3, 0.8, 1.0, 1.7))
        values |= rng.choice(({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "top_k": 20}))
    if rng.random() < 0.2:
        values |= rng.choice(({"repetition_penalty": 1.3}, {"frequency_penalty": 0.5}))
    if rng.random() < 0.15:
        values |= {"presence_penalty": 0.7}
    if rng.random() < 0.2:
        values["min_tokens"] = rng.randrange(values["max_tokens"] + 1)
    if rng.random() < 0.2:
        values["logit_bias"] = {rng.randrange(200): rng.uniform(-5, 5)}
    if rng.random() < 0.3:
        values["logprobs"] = rng.choice((0, 1, 5))
    if rng.random() < 0.1:
        values["prompt_logprobs"] = rng.choice((0, 2))
    if rng.random() < 0.25:
        values["stop"] = rng.choice((("e",), ("\n", "zz"), ("self",)))
    if rng.random() < 0.2:
        values["ignore_eos"] = True
    if constrained and rng.random() < 0.12:
        values["constraint"] = rng.choice(
            (Constraint.json_schema(SCHEMA), Constraint.regex("[a-f0-9]{4,12}"))
        )
    return SamplingParams(**values)


def some_requests(
    count: int | None = None, seed: int = 0, *, constrained: bool = True
) -> list[tuple[str, SamplingParams, int]]:
    """Prompts with their parameters, and after how many tokens each is aborted, 0 for never."""
    rng = random.Random(seed)
    found = []
    for i in range(request_count() if count is None else count):
        prompt = rng.choice(TEXTS) + "#" * rng.randrange(9) * (i % 3 == 0)
        params = some_params(rng, constrained=constrained)
        found.append((prompt, params, rng.choice((0, 0, 0, 0, 3))))
    return found


Told = tuple[list[int], str, str | None, object, object]


def run_all(engine: Engine, requests: Sequence[tuple[str, SamplingParams, int]]) -> list[Told]:
    """Tokens, text, reason and log probabilities of each request; all are queued at once.

    One that is to be aborted is told as far as that many tokens.
    """
    names, aborts, told = [], {}, dict[str, RequestOutput]()
    for _, params, _ in requests:
        if params.constraint:  # no run waits for it, so that all have the same steps
            engine._grammars.compile(params.constraint).result(60)
    for prompt, params, abort in requests:
        names.append(engine.add_request(prompt, params))
        aborts[names[-1]] = abort
    gained = dict.fromkeys(names, 0)
    while engine.has_unfinished:
        result = engine.advance()
        for name in result.names:
            gained[name] += 1
        told |= {output.request_id: output for output in result.finished}
        for name in dict.fromkeys(result.names):
            if aborts[name] and gained[name] >= aborts[name] and name not in told:
                output = engine.abort(name)
                assert output is not None
                told[name] = output
    engine.check_integrity()
    return [_shown(told[name], aborts[name]) for name in names]


def _shown(output: RequestOutput, abort: int) -> Told:
    most = abort or len(output.token_ids)  # an abort may come later than it was meant
    tokens = list(output.token_ids)[:most]
    logprobs = None if output.logprobs is None else list(output.logprobs)[:most]
    whole = not abort or len(output.token_ids) < abort
    prompt = None if output.prompt_logprobs is None else list(output.prompt_logprobs)
    text, reason = (output.text, output.finish_reason) if whole else ("", None)
    return tokens, text, reason, logprobs, prompt


def all_tokens(engine: Engine, requests: Sequence[tuple[str, SamplingParams, int]]) -> list:
    """Prompt and output of each request, with none aborted."""
    names = [engine.add_request(prompt, params) for prompt, params, _ in requests]
    done = dict[str, list[int]]()
    while engine.has_unfinished:
        for output in engine.advance().finished:
            done[output.request_id] = tokens_of(output)
            if output.param is not None:
                raise RequestError(str(output.error), output.param)
    return [done[name] for name in names]


def fork_within(runner: Engine, prompt: Sequence[int]) -> None:
    """Have a held request go on by tokens 30 to 38, 32, and 39 to 45, and fork it by 31 before 32."""
    held = runner.hold(prompt, top=2, beams=2, max_tokens=20)
    for i in range(16):
        runner.advance()
        runner.extend(held.name, 30 + i)
        if i == 8:
            runner.advance()
            runner.fork(held.name, "other", 31)
            runner.extend(held.name, 32)
    runner.advance()
    runner.abort(held.name)
    runner.abort("other")


def accepted(engine_of: Callable[..., Engine], folder: Path) -> float:
    """Tokens a step with drafts; tokens are those without.

    Args:
        engine_of: Makes an engine of a folder that drafts, or with None for a method does not.
        folder: The model's.
    """
    prompts = [[5 + i] * 15 + [9 + 3 * i] * i + [40 + i] for i in range(4)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    runner = engine_of(folder)
    found = [output.token_ids for output in runner.generate(prompts, params)]
    wanted = [output.token_ids for output in engine_of(folder, None).generate(prompts, params)]
    assert found == wanted
    assert len({token for ids in found for token in ids}) > 20
    return DraftCounts.of(runner.speculation).tokens_per_step
