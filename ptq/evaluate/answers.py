"""Batches of requests on one engine, in the order that lets it compute common beginnings once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from formats.errors import RequestError
from inference.engine import Engine
from inference.requests.request import RequestOutput, SamplingParams


def answers(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], bar: Any
) -> list[RequestOutput]:
    """Answers in the order of the prompts; those that begin alike are run near each other.

    Args:
        engine: Idle.
        bar: A progress bar, moved on by each answer.

    Raises:
        RequestError: a request is refused, or fails.
    """
    order = sorted(range(len(prompts)), key=lambda i: prompts[i])
    place = {engine.add_request(prompts[i], params[i]): i for i in order}
    done: dict[int, RequestOutput] = {}
    while len(done) < len(order):
        for output in engine.advance().finished:
            if output.finish_reason == "error":
                raise RequestError(f"a request failed: {output.error}")
            done[place[output.request_id]] = output
            bar.update()
    return [done[i] for i in range(len(prompts))]


def likelihoods(
    engine: Engine,
    asked: Sequence[tuple[Sequence[int], Sequence[int]]],
    bar: Any,
    adapter: str | None = None,
) -> list[tuple[float, bool]]:
    """Log probability of each (context, continuation)'s latter, and whether it is greedy.

    What contexts have in common is computed once.
    """
    prompts = [[*context, *continuation] for context, continuation in asked]
    starts = [len(context) for context, _ in asked]
    params = [
        SamplingParams(
            max_tokens=1, prompt_logprobs=1, prompt_logprobs_start=start, adapter=adapter
        )
        for start in starts
    ]
    outputs = answers(engine, prompts, params, bar)
    return [_likelihood(output, start) for output, start in zip(outputs, starts, strict=True)]


def _likelihood(output: RequestOutput, start: int) -> tuple[float, bool]:
    logprobs, ids = output.prompt_logprobs, output.prompt_token_ids
    assert logprobs is not None
    total, greedy = 0.0, True
    for i in range(start, len(ids)):
        row = logprobs[i]
        assert row is not None
        total += row[ids[i]]
        greedy = greedy and row[ids[i]] >= max(row.values())
    return total, greedy
