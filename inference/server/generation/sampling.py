"""From the fields of a body to how the engine decodes."""

from __future__ import annotations

from collections.abc import Iterator

from inference.requests.constraint import Constraint
from inference.requests.request import SamplingParams
from inference.server.schema.generation import GenerationBody, constraint_of

LEAST_TOP_P = 1e-10  # OpenAI takes 0, which leaves the likeliest token only, as this does


SEEDS = 2**63


def sampling_params(
    body: GenerationBody,
    max_tokens: int,
    *,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    constraint: Constraint | None = None,
    adapter: str | None = None,
) -> SamplingParams:
    """How the first answer is decoded; what the body leaves out is as OpenAI has it.

    Args:
        body: What was asked for.
        max_tokens: Most tokens of the answer.
        logprobs: How many log probabilities are needed.
        prompt_logprobs: And of the prompt.
        constraint: What the text must match, where it is not `response_format` that says so.
        adapter: Name of the adapter that the body's model is, if it is one.

    Raises:
        RequestError: a value is not allowed; `param` names the field.
    """

    def given(name: str, default: float) -> float:
        value = getattr(body, name)
        return default if value is None else value

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=float(given("temperature", 1.0)),
        top_k=max(0, int(given("top_k", 0))),
        top_p=max(LEAST_TOP_P, given("top_p", 1.0)),
        min_p=float(given("min_p", 0.0)),
        repetition_penalty=float(given("repetition_penalty", 1.0)),
        presence_penalty=float(given("presence_penalty", 0.0)),
        frequency_penalty=float(given("frequency_penalty", 0.0)),
        logit_bias=tuple((int(k), v) for k, v in (body.logit_bias or {}).items()),
        seed=None if body.seed is None else body.seed % SEEDS,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=int(given("min_tokens", 0)),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint or constraint_of(body.response_format),
        reference="" if body.prediction is None else body.prediction.text,
        adapter=adapter,
    )


def for_each(params: SamplingParams, count: int) -> Iterator[SamplingParams]:
    """The same for several answers to one prompt: seeds count up."""
    for index in range(count):
        if index and params.seed is not None:
            yield params.model_copy(update={"seed": (params.seed + index) % SEEDS})
        else:
            yield params
