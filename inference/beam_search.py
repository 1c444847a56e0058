"""Beam search: the likeliest continuations of a prompt, as a client of the engine.

At each step every beam is continued by its likeliest tokens; of all these candidates the likeliest
are kept (Graves 2012, "Sequence Transduction with Recurrent Neural Networks", section 2.5). What
has ended is scored by

    score = sum of log probabilities / length ** length_penalty

(Wu et al. 2016, "Google's Neural Machine Translation System", section 7, has a length penalty of
another form), where the length counts the generated tokens, an end token included. Which candidates
count, and when the search ends, is as in transformers 5 (`GenerationMixin._beam_search`), so that
hypotheses and scores are the same:

- Of `beam_width` beams the best max(2, 1 + number of end tokens) * `beam_width` candidates are
  looked at: so many that `beam_width` are left when all that can end does.
- A candidate that ends becomes a hypothesis only if it is among the best `beam_width`.
- The best `beam_width` hypotheses are kept; see `BeamParams.early_stopping` for the end.

Beams are requests that the engine holds after each token (`Engine.hold`). They share the blocks of
the cache that hold what they have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from formats.errors import EngineError, RequestError
from inference.requests.request import Logprobs, RequestParams, StepResult

if TYPE_CHECKING:
    from inference.engine import Engine


class BeamParams(RequestParams):
    """How beams of one request are searched.

    Attributes:
        beam_width: Beams that go on at each step, and hypotheses that are kept.
        n: Hypotheses that are wanted, at most `beam_width`.
        max_tokens: Most tokens to generate; fewer where `max_model_len` ends.
        length_penalty: Exponent of the length in a score. Since log probabilities are negative,
            above 0 favours long hypotheses, below 0 short ones; 0 compares probabilities.
        early_stopping: When a search with `beam_width` hypotheses ends. True: at once. False: when
            the best beam, scored as long as it is now, is no better than the worst of them; it
            could still become so where `length_penalty` is above 0. "never": when no beam can
            become better, however long.
        stop_token_ids: Tokens that end a hypothesis, beside the model's own end tokens.
        ignore_eos: Go on after the model's end tokens.
        logprobs: Give the log probabilities of the so many most likely tokens, and of the chosen
            one, at each place of a hypothesis.
        adapter: Name of the adapter that they run with (`Engine.load_adapter`); None for none.

    Raises:
        RequestError: a value is not allowed; `param` names it.
    """

    beam_width: int = Field(default=4, ge=1, le=32)
    n: int = Field(default=1, ge=1)
    max_tokens: int = Field(default=128, ge=1)
    length_penalty: float = Field(default=1.0, ge=-16, le=16)
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: tuple[int, ...] = Field(default=(), strict=False)
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=100)
    adapter: str | None = None

    def model_post_init(self, context: object, /) -> None:
        """Check what depends on two values."""
        if self.n > self.beam_width:
            raise RequestError(
                f"n: {self.n} hypotheses are more than beam_width {self.beam_width} keeps; ask for "
                "fewer, or for more beams",
                "n",
            )

    def score(self, total: float, length: int) -> float:
        """Score of a hypothesis of so many tokens, whose log probabilities sum to `total`."""
        return total / length**self.length_penalty


@dataclass(frozen=True)
class Hypothesis:
    """A continuation that ended.

    Attributes:
        token_ids: Its tokens, an end token included.
        score: What hypotheses are compared by.
        cumulative_logprob: Sum of the log probabilities of its tokens.
        finish_reason: `stop`: its last token is an end token; `length`: it is as long as allowed.
        logprobs: For each token, {token: log probability}, if wanted.
    """

    token_ids: tuple[int, ...]
    score: float
    cumulative_logprob: float
    finish_reason: Literal["stop", "length"]
    logprobs: tuple[dict[int, float], ...] | None = None

    def text(self, tokenizer: Any) -> str:
        """Its text, by a transformers tokenizer; without the end token, as of other outputs."""
        tokens = self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids
        return tokenizer.decode(list(tokens), skip_special_tokens=True)


@dataclass(frozen=True, eq=False)
class _Beam:
    """A continuation of a prompt: a token after another beam, or nothing after the prompt.

    Attributes:
        parent: The beam without its last token; None for the prompt alone.
        token: The last token.
        logprobs: What was likely in its place: {token: log probability}, most likely first.
        total: Sum of the log probabilities of all its tokens.
    """

    parent: _Beam | None = None
    token: int = -1
    logprobs: Logprobs | None = None
    total: float = 0.0

    def path(self) -> list[_Beam]:
        """The beams that it went through, a token longer each; the last is itself."""
        beams, beam = [], self
        while beam.parent is not None:
            beams.append(beam)
            beam = beam.parent
        return beams[::-1]


class BeamSearch:
    """The search of one request; `take` each step's result until it is `done`.

    Args:
        engine: Computes the beams; whoever drives it gives this search what its steps tell.
        prompt: Text, or token ids.
        params: How beams are searched.
        name: The request's; default a new one. Names of beams begin with it.

    Attributes:
        done: Whether the search has ended, by itself or by `abort`.
        error: Why it failed; None where it did not.
        hypotheses: The best `n`, best first, once it is done.

    Raises:
        RequestError: the prompt or a parameter is not allowed, or the beams do not fit the engine.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: str | Sequence[int],
        params: BeamParams | None = None,
        name: str | None = None,
    ) -> None:
        self.params = params = params or BeamParams()
        self._engine = engine
        own = frozenset() if params.ignore_eos else engine.end_tokens
        self._ends = own | frozenset(params.stop_token_ids)
        self._candidates = max(2, 1 + len(self._ends)) * params.beam_width
        held = engine.hold(
            prompt,
            top=max(self._candidates, params.logprobs or 0),
            beams=params.beam_width,
            max_tokens=params.max_tokens,
            stop_token_ids=params.stop_token_ids,
            request_id=name,
            adapter=params.adapter,
        )
        self.name, self._most = held.name, held.max_tokens
        self._running = {self.name: _Beam()}
        self._proposed: dict[str, Logprobs] = {}
        self._length = self._forks = 0
        self._kept: list[Hypothesis] = []
        self.done, self.error = False, None

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The best `n` that have ended, best first."""
        return self._kept[: self.params.n]

    def take(self, result: StepResult) -> None:
        """Take the candidates of a step of the engine; says how its beams go on."""
        if self.done:
            return
        for output in result.finished:
            if output.request_id in self._running:
                self.error = output.error or f"a beam ended by {output.finish_reason}"
                self.abort()
                return
        found = result.candidates
        self._proposed |= {name: found[name] for name in self._running if name in found}
        if len(self._proposed) == len(self._running):  # beams go on together
            candidates, self._proposed = self._ranked(self._proposed), {}
            self._choose(candidates)

    def abort(self) -> None:
        """End the search now; the cache has its blocks back."""
        for name in self._running:
            self._engine.abort(name)
        self._running, self.done = {}, True

    def _ranked(self, candidates: Mapping[str, Logprobs]) -> list[tuple[str, _Beam]]:
        """The best candidates, best first, each with the name of the beam that it continues."""
        found = [
            (beam.total + logprob, name, token)
            for name, beam in self._running.items()
            for token, logprob in candidates[name].items()
        ]
        found.sort(key=itemgetter(0), reverse=True)  # stable: of equals the better beam's
        return [
            (name, _Beam(self._running[name], token, candidates[name], total))
            for total, name, token in found[: self._candidates]
        ]

    def _choose(self, candidates: list[tuple[str, _Beam]]) -> None:
        """Keep the hypotheses among candidates, and let the others go on, or end the search."""
        width = self.params.beam_width
        self._length += 1
        full = self._length == self._most
        open_ones = [pair for pair in candidates if pair[1].token not in self._ends and not full]
        ended = [b for _, b in candidates[:width] if full or b.token in self._ends]
        self._kept += map(self._hypothesis, ended)
        self._kept = sorted(self._kept, key=lambda h: -h.score)[:width]
        if not open_ones or self._decided(open_ones[0][1].total):
            self.abort()
        else:
            self._go_on(open_ones[:width])

    def _decided(self, best: float) -> bool:
        """Whether hypotheses stay as they are; `best` is the sum of the best beam."""
        params = self.params
        if len(self._kept) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        longest = params.early_stopping == "never" and params.length_penalty > 0
        reach = params.score(best, self._most if longest else self._length)
        return reach <= self._kept[-1].score

    def _go_on(self, chosen: Sequence[tuple[str, _Beam]]) -> None:
        """Tell the engine: beams that nothing continues end, each other goes on or is forked."""
        sources = {name for name, _ in chosen}
        for name in self._running.keys() - sources:
            self._engine.abort(name)
        first = dict(reversed(chosen))
        running = {}
        for source, beam in chosen:  # forks come first: they are of the source as it is
            name = source
            if first[source] is not beam:
                self._forks += 1
                name = f"{self.name}/{self._forks}"
                self._engine.fork(source, name, beam.token)
            running[name] = beam
        for name, beam in first.items():
            self._engine.extend(name, beam.token)
        self._running = running

    def _hypothesis(self, beam: _Beam) -> Hypothesis:
        params, path = self.params, beam.path()
        wanted = params.logprobs is not None
        return Hypothesis(
            token_ids=tuple(b.token for b in path),
            score=params.score(beam.total, len(path)),
            cumulative_logprob=beam.total,
            finish_reason="stop" if beam.token in self._ends else "length",
            logprobs=tuple(_top(b, params.logprobs or 0) for b in path) if wanted else None,
        )


def _top(beam: _Beam, count: int) -> dict[int, float]:
    """The most likely tokens in the place of a beam's last, and that one itself."""
    assert beam.logprobs is not None
    return dict(list(beam.logprobs.items())[:count]) | {beam.token: beam.logprobs[beam.token]}


def beam_search(
    engine: Engine,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    params: BeamParams | None = None,
) -> list[list[Hypothesis]]:
    """Search the likeliest continuations of a batch of prompts.

    Args:
        engine: An idle engine. Beside other requests, give a `BeamSearch` what its steps tell.
        prompts: Texts or token ids, a list each; or one text.
        params: How beams are searched.

    Returns:
        For each prompt its best `n` hypotheses, best first.

    Raises:
        RequestError: a prompt or a parameter is not allowed, or the beams do not fit the engine;
            none is run.
        EngineError: a step or a search failed, or other requests run.
    """
    if engine.has_unfinished:
        raise EngineError(
            "other requests run, and would get nothing of these steps; finish them first, or "
            "give a BeamSearch what Engine.advance tells"
        )
    searches: list[BeamSearch] = []
    try:
        for prompt in [prompts] if isinstance(prompts, str) else prompts:
            searches.append(BeamSearch(engine, prompt, params))
        while not all(search.done for search in searches):
            result = engine.advance()
            for search in searches:
                search.take(result)
    finally:  # of a batch that is refused or interrupted nothing is left
        for search in searches:
            search.abort()
    for search in searches:
        if search.error is not None:
            raise EngineError(f"a beam search failed: {search.error}")
    return [search.hypotheses for search in searches]
