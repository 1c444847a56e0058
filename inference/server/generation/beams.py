"""Beam search in the place of sampling: `beam_width` in a body."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from inference.beam_search import BeamParams, Hypothesis
from inference.server.generation.choices import Answer
from inference.server.generation.served_model import ServedModel
from inference.server.http.errors import ApiError
from inference.server.schema.generation import GenerationBody

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
) -> list[Answer]:
    """The best `n` answers to each prompt, the best first.

    Args:
        served: The engine and the tokenizer.
        prompts: Token ids.
        body: What was asked.
        max_tokens: Most tokens of an answer, for each prompt.
        logprobs: How many log probabilities are told of each token.

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


def _answer(served: ServedModel, hypothesis: Hypothesis) -> Answer:
    text, tokens = hypothesis.text(served.tokenizer), list(hypothesis.token_ids)
    known = [dict(each) for each in hypothesis.logprobs or ()]
    return Answer(text, tokens, known, None, hypothesis.finish_reason)
