"""Batches of requests on one engine, in the order that lets it compute common beginnings once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from formats.errors import RequestError
from inference.engine import Engine
from inference.requests.request import RequestOutput, SamplingParams

LIKELY = 100  # tokens whose log probabilities a request gives at most


def answers(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], bar: Any
) -> list[RequestOutput]:
    """Answers in the order of the prompts; those that begin alike are run near each other.

    Args:
        engine: Idle.
        bar: A progress bar, moved on by each answer; or None.

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
            if bar is not None:
                bar.update()
    return [done[i] for i in range(len(prompts))]


def likelihoods(
    engine: Engine,
    asked: Sequence[tuple[Sequence[int], Sequence[int]]],
    bar: Any,
    adapter: str | None = None,
) -> list[tuple[float, bool]]:
    """Log probability of each (context, continuation)'s latter, and whether it is greedy.

    What contexts have in common is computed once. Choices of one token after one context are found
    among what the model says is likely there, and asked for by themselves only where they are not.
    """
    found = _among_likely(engine, asked, bar, adapter)
    left = [i for i in range(len(asked)) if i not in found]
    starts = [len(asked[i][0]) for i in left]
    params = [
        SamplingParams(
            max_tokens=1, prompt_logprobs=1, prompt_logprobs_start=start, adapter=adapter
        )
        for start in starts
    ]
    outputs = answers(engine, [[*asked[i][0], *asked[i][1]] for i in left], params, bar)
    for i, output, start in zip(left, outputs, starts, strict=True):
        found[i] = _likelihood(output, start)
    return [found[i] for i in range(len(asked))]


def _among_likely(
    engine: Engine,
    asked: Sequence[tuple[Sequence[int], Sequence[int]]],
    bar: Any,
    adapter: str | None,
) -> dict[int, tuple[float, bool]]:
    """Those of one token that share a context and are among the most likely ones, by index."""
    choices: dict[tuple[int, ...], list[int]] = {}
    for i, (context, continuation) in enumerate(asked):
        if len(continuation) == 1:
            choices.setdefault(tuple(context), []).append(i)
    shared = {context: own for context, own in choices.items() if len(own) > 1}
    params = SamplingParams(max_tokens=1, logprobs=LIKELY, ignore_eos=True, adapter=adapter)
    contexts = [list(context) for context in shared]
    outputs = answers(engine, contexts, [params] * len(shared), None)
    found = {}
    for own, output in zip(shared.values(), outputs, strict=True):
        assert output.logprobs is not None
        (row,) = output.logprobs
        for i in own:
            if (token := asked[i][1][0]) in row:
                found[i] = row[token], row[token] >= max(row.values())
                bar.update()
    return found


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
