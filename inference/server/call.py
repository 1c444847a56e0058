"""One HTTP request for answers: what the engine is asked, and what the answers gain.

A formatter makes a `Call` of a body; `deltas` gives what its answers gain as it comes, `answers`
all of them. Closing `deltas`, as where a client has left, cancels what runs. Where there is a beam
search, it takes the place of sampling.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from formats.errors import EngineError, RequestError
from inference.beam_search import BeamParams
from inference.requests.request import Logprobs, SamplingParams
from inference.server.engine_client import Overloaded, Unavailable
from inference.server.schema.generation import GenerationBody, constraint_of, named_error
from inference.server.served_model import ServedModel
from inference.server.stream import AnswerText, Delta, DeltaStream
from inference.server.tools.parser import ToolParser
from inference.server.tools.use import ToolUse

LEAST_TOP_P = 1e-10  # OpenAI takes 0, which leaves the likeliest token only, as this does
SEEDS = 2**63
SAME = "min_p repetition_penalty presence_penalty frequency_penalty min_tokens ignore_eos".split()


def sampling_params(body: GenerationBody, **more: Any) -> SamplingParams:
    """How the first answer is decoded; what the body leaves out is as OpenAI has it.

    Args:
        more: Further fields of the parameters; a `constraint` takes the place of the body's own.

    Raises:
        RequestError: a value is not allowed; `param` names the field.
    """
    more["constraint"] = more.get("constraint") or constraint_of(body.response_format)
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else max(LEAST_TOP_P, body.top_p),
        logit_bias=tuple((int(k), v) for k, v in (body.logit_bias or {}).items()),
        seed=None if body.seed is None else body.seed % SEEDS,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        reference="" if body.prediction is None else body.prediction.text,
        **{name: value for name in SAME if (value := getattr(body, name)) is not None},
        **more,
    )


def beam_params(
    body: GenerationBody, params: Sequence[SamplingParams], logprobs: int | None
) -> list[BeamParams] | None:
    """How beams are searched for each prompt, if they are; `params` are of `sampling_params`.

    Raises:
        RequestError: a value is not allowed; `param` names the field.
    """
    if body.beam_width is None:
        return None
    given = {"length_penalty": body.length_penalty, "early_stopping": body.early_stopping}
    own = {name: value for name, value in given.items() if value is not None}
    own |= {"beam_width": body.beam_width, "n": body.n or 1, "logprobs": logprobs}
    same = {"max_tokens", "stop_token_ids", "ignore_eos", "adapter"}
    return [BeamParams(**each.model_dump(include=same), **own) for each in params]


@dataclass
class Usage:
    """Tokens of a call so far.

    Attributes:
        prompt: Of the prompts.
        speculates: Whether the engine makes drafts, so that the usage counts them.
        completion: Of the answers.
        drafts: Drafts of all answers that were computed.
        accepted: Tokens of the answers that were drafts.
        cached: Tokens of the prompts that the prefix cache held when their first answers began.
    """

    prompt: int
    speculates: bool
    completion: int = 0
    drafts: int = 0
    accepted: int = 0
    cached: int = 0

    def add(self, gained: Delta) -> None:
        """Count what an answer gained, or all of one."""
        self.completion += len(gained.token_ids)
        self.drafts += gained.drafts
        self.accepted += gained.accepted

    def __str__(self) -> str:
        return f"{self.prompt}+{self.completion}"

    @property
    def content(self) -> dict[str, Any]:
        """As OpenAI's `usage`."""
        total = self.prompt + self.completion
        fields = {"prompt_tokens": self.prompt, "completion_tokens": self.completion}
        content: dict[str, Any] = fields | {"total_tokens": total}
        if self.cached:
            content["prompt_tokens_details"] = {"cached_tokens": self.cached}
        if self.speculates:
            content["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafts - self.accepted,
            }
        return content


@dataclass
class Call:
    """One request of a client.

    Attributes:
        params: How the first answer to each prompt is decoded; the seeds of the others count up.
        n: Answers to each prompt that are given.
        best_of: Answers to each prompt that are tried, of which the likeliest are given.
        tools: What the model may call, if anything.
        beams: How beams are searched for each prompt, in the place of sampling.
        silent: Whether no token is given, only log probabilities of the prompts; the engine makes
            one all the same, which is not counted.
    """

    served: ServedModel
    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    stops: tuple[str, ...] = ()
    n: int = 1
    best_of: int = 1
    tools: ToolUse | None = None
    beams: Sequence[BeamParams] | None = None
    silent: bool = False
    usage: Usage = field(init=False)

    def __post_init__(self) -> None:
        speculates = self.served.client.info.speculates
        self.usage = Usage(sum(map(len, self.prompts)), speculates)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """What answers gain, with their places: `best_of` of the first prompt, then of the next.

        Raises:
            EngineError: one of them failed (500), or the server ends (Unavailable, 503).
            RequestError: the engine does not take one.
        """
        news: asyncio.Queue[DeltaStream] = asyncio.Queue()
        streams = self._submit(news)
        parsers = [self.tools and self.tools.parser() for _ in streams]
        left = {stream: place for place, stream in enumerate(streams)}
        try:
            while left:
                stream = await news.get()
                delta = stream.read()
                if delta is None:
                    continue
                _check(delta)
                if not self.silent:
                    self.usage.add(delta)
                place = left[stream]
                if place % self.best_of == 0:  # others find what the first has computed
                    self.usage.cached += delta.cached
                _find_calls(parsers[place], delta)
                if delta.finish_reason is not None:
                    del left[stream]
                    stream.cancel()
                yield place, delta
        except RequestError as error:
            constrained = self.tools is not None and self.tools.constraint is not None
            raise named_error(error, "tools" if constrained else "response_format") from error
        finally:
            _cancel(streams)

    async def answers(self) -> list[Delta]:
        """All of every answer that is given, prompt by prompt, the best first; raises as `deltas`.

        What a beam search finds is in the order of its scores.
        """
        if self.beams is not None:
            return await self._search(self.beams)
        made = [Delta() for _ in range(len(self.prompts) * self.best_of)]
        async with aclosing(self.deltas()) as deltas:
            async for place, delta in deltas:
                made[place].add(delta)
        if self.best_of == self.n:
            return made
        groups = [made[i : i + self.best_of] for i in range(0, len(made), self.best_of)]
        ranked = [sorted(group, key=lambda answer: -answer.mean_logprob) for group in groups]
        return [answer for group in ranked for answer in group[: self.n]]

    def _submit(self, news: asyncio.Queue[DeltaStream]) -> list[DeltaStream]:
        """Queue all requests or none.

        Raises:
            RequestError, Overloaded, Unavailable: as `EngineClient.submit`. What would be too much
                for an idle engine, too, is a RequestError: no client should try it again.
        """
        streams: list[DeltaStream] = []
        idle = not self.served.client.in_flight
        try:
            for prompt, first in zip(self.prompts, self.params, strict=True):
                for index in range(self.best_of):
                    params = first
                    if index and first.seed is not None:
                        seed = (first.seed + index) % SEEDS
                        params = first.model_copy(update={"seed": seed})
                    streams.append(self._submit_one(prompt, params, news))
        except BaseException as error:
            _cancel(streams)
            if not isinstance(error, Overloaded) or not idle or len(streams) <= 1:
                raise
            param = "prompt" if len(self.prompts) > 1 else "n"
            count = len(self.prompts) * self.best_of
            message = f"{param}: {count} answers are more than may wait; ask for fewer"
            raise RequestError(message, param) from error
        return streams

    def _submit_one(
        self, prompt: list[int], params: SamplingParams, news: asyncio.Queue[DeltaStream]
    ) -> DeltaStream:
        client, ends = self.served.client, None
        stream = client.submit(prompt, params)
        if params.constraint is not None:
            ends = client.info.end_tokens | {*params.stop_token_ids}
        stream.news = news
        stream.text = AnswerText(self.served.tokenizer, self.stops, params.min_tokens, ends)
        return stream

    async def _search(self, beams: Sequence[BeamParams]) -> list[Delta]:
        pairs = zip(self.prompts, beams, strict=True)
        tasks = [asyncio.ensure_future(self.served.client.beam(*pair)) for pair in pairs]
        try:
            found = await asyncio.gather(*tasks)
        finally:  # where one fails, the others end with it
            for task in tasks:
                task.cancel()
        made: list[Delta] = []
        for one in (hypothesis for hypotheses in found for hypothesis in hypotheses):
            text, tokens = one.text(self.served.tokenizer), [*one.token_ids]
            logprobs: list[Logprobs] = [*(one.logprobs or ())]
            made.append(Delta(text, [], tokens, logprobs, finish_reason=one.finish_reason))
            self.usage.add(made[-1])
            _find_calls(self.tools and self.tools.parser(), made[-1])
        return made


def _cancel(streams: Sequence[DeltaStream]) -> None:
    """End what has not ended."""
    for stream in streams:
        stream.cancel()


def _find_calls(parser: ToolParser | None, delta: Delta) -> None:
    """Fill in the parts of what an answer gained; a call that is all that is wanted ends it."""
    if parser is None:
        delta.parts = [delta.text] if delta.text else []
        return
    delta.parts = parser.feed(delta.text)
    if parser.done or delta.finish_reason is not None:
        delta.parts += parser.finish()
    if parser.done or (delta.finish_reason == "stop" and parser.called):
        delta.finish_reason = "tool_calls"


def _check(delta: Delta) -> None:
    if delta.finish_reason == "error":
        raise EngineError(delta.error or "the engine failed at this request")
    if delta.finish_reason == "abort":
        raise Unavailable(delta.error or "the server is stopping")
