"""The requests of one call: each prompt's answers, read as they come or all at once.

Where a body has `beam_width`, beam search takes the place of sampling (`beam_answers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from formats.errors import EngineError, PTQError, RequestError
from inference.beam_search import BeamParams, Hypothesis
from inference.requests.request import SamplingParams
from inference.server.engine_client import Overloaded, Unavailable
from inference.server.generation.sampling import for_each
from inference.server.generation.served_model import ServedModel
from inference.server.http.errors import ApiError
from inference.server.schema.generation import GenerationBody, named_error
from inference.server.stream import Delta, DeltaStream


def submit(
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    stops: tuple[str, ...],
    each: int = 1,
) -> list[DeltaStream]:
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
    streams: list[DeltaStream] = []
    idle, known_ends = not served.client.in_flight, served.client.info.end_tokens
    try:
        for prompt, first in zip(prompts, params, strict=True):
            for one in for_each(first, each):
                tokens = served.client.submit(prompt, one)
                ends = None if one.constraint is None else known_ends | {*one.stop_token_ids}
                tokens.detokenize(served.tokenizer, stops, one.min_tokens, ends)
                streams.append(tokens)
    except Overloaded as error:
        cancel(streams)
        if not idle or len(streams) <= 1:
            raise
        param = "prompt" if len(prompts) > 1 else "n"
        message = f"{param}: {len(prompts) * each} answers are more than may wait; ask for fewer"
        raise RequestError(message, param) from error
    except BaseException:
        cancel(streams)
        raise
    return streams


def cancel(streams: Sequence[DeltaStream]) -> None:
    """End what has not ended."""
    for stream in streams:
        stream.cancel()


async def deltas(
    streams: Sequence[DeltaStream], constrained_by: str = "response_format"
) -> AsyncGenerator[tuple[int, Delta], None]:
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


async def _merged(streams: Sequence[DeltaStream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """What several streams give, each read by a task of its own."""
    queue: asyncio.Queue[tuple[int, Delta | PTQError | None]] = asyncio.Queue()

    async def read(index: int, stream: DeltaStream) -> None:
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


def _checked(delta: Delta) -> Delta:
    if delta.finish_reason == "error":
        raise EngineError(delta.error or "the engine failed at this request")
    if delta.finish_reason == "abort":
        raise Unavailable(delta.error or "the server is stopping")
    return delta


async def answers(streams: Sequence[DeltaStream]) -> list[Delta]:
    """All of every answer, in the order of the streams; raises as `deltas`."""
    gathered = [Delta() for _ in streams]
    async with aclosing(deltas(streams)) as parts:
        async for index, delta in parts:
            gathered[index].add(delta)
    return gathered


OF_SAMPLING = (
    "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty "
    "logit_bias min_tokens stop response_format stream best_of echo"
).split()


OF_BEAMS = ("length_penalty", "early_stopping")


def check_beams(body: GenerationBody) -> None:
    """Refuse what does not go with a beam search, or goes with nothing else.

    Raises:
        ApiError: 400: a field is there that would have no effect.
    """
    for name in OF_SAMPLING if body.beam_width is not None else OF_BEAMS:
        if getattr(body, name, None) not in (None, False):
            reason = "has no place in a beam search" if body.beam_width else "needs beam_width"
            raise ApiError(400, f"{name}: it {reason}; leave it out", name, "invalid_value")


async def beam_answers(
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    body: GenerationBody,
    max_tokens: Sequence[int],
    logprobs: int | None,
) -> list[Delta]:
    """The best `n` answers to each prompt, the best first.

    Args:
        served: The engine and the tokenizer.
        prompts: Token ids.
        body: What was asked.
        max_tokens: Most tokens of an answer, for each prompt.
        logprobs: How many log probabilities each token gets.

    Raises:
        RequestError: a parameter is not allowed; `param` names it.
    """
    given = {"length_penalty": body.length_penalty, "early_stopping": body.early_stopping}
    values = {name: value for name, value in given.items() if value is not None}
    searches = [
        BeamParams(
            beam_width=body.beam_width or 1,
            n=body.n or 1,
            max_tokens=most,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            adapter=served.check_model(body.model),
            **values,
        )
        for most in max_tokens
    ]
    pairs = zip(prompts, searches, strict=True)
    tasks = [asyncio.ensure_future(served.client.beam(*pair)) for pair in pairs]
    try:
        found = await asyncio.gather(*tasks)
    finally:  # where one fails, the others end with it
        for task in tasks:
            task.cancel()
    return [_answer(served, hypothesis) for hypotheses in found for hypothesis in hypotheses]


def _answer(served: ServedModel, hypothesis: Hypothesis) -> Delta:
    text, tokens = hypothesis.text(served.tokenizer), list(hypothesis.token_ids)
    known = [dict(each) for each in hypothesis.logprobs or ()]
    return Delta(text, tokens, known, None, hypothesis.finish_reason)
