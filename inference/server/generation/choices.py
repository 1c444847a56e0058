"""The requests of one call: each prompt's answers, read as they come or all at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from formats.errors import EngineError, PTQError, RequestError
from inference.requests.request import FinishReason, SamplingParams
from inference.server.engine_client import Overloaded, Unavailable
from inference.server.generation.sampling import for_each
from inference.server.generation.served_model import ServedModel
from inference.server.messages import Logprobs
from inference.server.schema.response_format import named_error
from inference.server.text_stream import TextDelta, TextStream


@dataclass
class Answer:
    """All of one answer; fields as of `TextDelta`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] | None = None
    finish_reason: FinishReason | None = None
    drafts: int = 0
    accepted: int = 0

    @property
    def mean_logprob(self) -> float:
        """Of its tokens, those that were chosen; by it the best of several is found."""
        chosen = [known[t] for t, known in zip(self.token_ids, self.logprobs, strict=True)]
        return sum(chosen) / max(1, len(chosen))

    def add(self, delta: TextDelta) -> None:
        """Take what came."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.drafts += delta.drafts
        self.accepted += delta.accepted


def submit(
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    stops: tuple[str, ...],
    each: int = 1,
) -> list[TextStream]:
    """Queue `each` answers to every prompt, all or none; prompt by prompt.

    Args:
        served: The engine and the tokenizer.
        prompts: Token ids.
        params: Of each prompt's first answer.
        stops: Texts that end an answer.
        each: Answers to each prompt.

    Raises:
        RequestError, Overloaded, Unavailable: as `EngineClient.submit`. What would be too much for
            an idle engine, too, is a RequestError: no client should try it again.
    """
    streams: list[TextStream] = []
    idle, known_ends = not served.client.in_flight, served.client.info.end_tokens
    try:
        for prompt, first in zip(prompts, params, strict=True):
            for one in for_each(first, each):
                tokens = served.client.submit(prompt, one)
                ends = None if one.constraint is None else known_ends | {*one.stop_token_ids}
                made = TextStream(tokens, served.tokenizer, stops, one.min_tokens, ends)
                streams.append(made)
    except Overloaded as error:
        cancel(streams)
        if not idle or len(streams) <= 1:
            raise
        param = "prompt" if len(prompts) > 1 else "n"
        told = f"{param}: {len(prompts) * each} answers are more than may wait; ask for fewer"
        raise RequestError(told, param) from error
    except BaseException:
        cancel(streams)
        raise
    return streams


def cancel(streams: Sequence[TextStream]) -> None:
    """End what has not ended."""
    for stream in streams:
        stream.cancel()


async def deltas(
    streams: Sequence[TextStream], constrained_by: str = "response_format"
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """What answers gain, with their places among the streams; closing it cancels them.

    Args:
        streams: The answers'.
        constrained_by: The field that a constraint comes of.

    Raises:
        EngineError: one of them failed (500), or the server ends (Unavailable, 503).
        RequestError: the engine does not take one.
    """
    try:
        if len(streams) == 1:
            async for delta in streams[0]:
                yield 0, _checked(delta)
            return
        async with aclosing(_merged(streams)) as merged:
            async for index, delta in merged:
                yield index, _checked(delta)
    except RequestError as error:
        raise named_error(error, constrained_by) from error
    finally:
        cancel(streams)


async def _merged(streams: Sequence[TextStream]) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """What several streams give, each read by a task of its own."""
    queue: asyncio.Queue[tuple[int, TextDelta | PTQError | None]] = asyncio.Queue()

    async def read(index: int, stream: TextStream) -> None:
        try:
            async for delta in stream:
                queue.put_nowait((index, delta))
        except PTQError as error:
            queue.put_nowait((index, error))
        finally:
            queue.put_nowait((index, None))

    tasks = [asyncio.ensure_future(read(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, PTQError):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _checked(delta: TextDelta) -> TextDelta:
    if delta.finish_reason == "error":
        raise EngineError(delta.error or "the engine failed at this request")
    if delta.finish_reason == "abort":
        raise Unavailable(delta.error or "the server is stopping")
    return delta


async def answers(streams: Sequence[TextStream]) -> list[Answer]:
    """All of every answer, in the order of the streams; raises as `deltas`."""
    gathered = [Answer() for _ in streams]
    async with aclosing(deltas(streams)) as parts:
        async for index, delta in parts:
            gathered[index].add(delta)
    return gathered
