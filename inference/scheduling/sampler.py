"""From logits to the next token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.scheduling.request import SamplingParams

FIRST_CANDIDATES = 64  # tokens that top_p looks at first; more where they are not enough


def penalize(
    logits: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> Tensor:
    """Apply repetition, presence and frequency penalties; see `SamplingParams`.

    Args:
        logits: fp32 [vocabulary].
        prompt: Tokens of the prompt.
        output: Generated tokens.
        params: The request's.

    Returns:
        New logits.
    """
    logits = logits.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *output}))
        value = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(value > 0, value / factor, value * factor)
    if output and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = torch.tensor(output).unique(return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    return logits


def keep_likely(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set the logits of all but the likely tokens to minus infinity.

    Only as many tokens are sorted as may be kept; the vocabulary as a whole never is.

    Args:
        logits: fp32 [vocabulary], after temperature.
        top_k: Most tokens to keep, 0 for all; the lower ids of equals.
        top_p: Of those, keep the fewest whose probabilities sum to at least this.
    """
    if top_k == 0 and top_p == 1.0:
        return logits
    count = min(top_k or FIRST_CANDIDATES, len(logits))
    while True:
        values, index = _largest(logits, count)
        mass = values if top_k else logits  # what probabilities are relative to
        probabilities = torch.exp(values - torch.logsumexp(mass, dim=0))
        before = probabilities.cumsum(0) - probabilities
        keep = before < top_p if top_p < 1.0 else torch.ones_like(before, dtype=torch.bool)
        if top_k or count == len(logits) or not bool(keep[-1]):
            break
        count = min(8 * count, len(logits))
    kept = torch.full_like(logits, -torch.inf)
    kept[index[keep]] = values[keep]
    return kept


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids of the largest logits, descending; of equals the lower ids, in order."""
    least = logits.topk(count).values[-1]
    index = (logits >= least).nonzero().flatten()
    values, order = logits[index].sort(descending=True, stable=True)
    return values[:count], index[order[:count]]


def sample(
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    forbidden: Sequence[int],
    generator: torch.Generator | None,
) -> int:
    """Choose the next token of one request.

    Args:
        logits: fp32 [vocabulary].
        prompt: Tokens of the prompt.
        output: Generated tokens.
        params: The request's.
        forbidden: Tokens that may not come now: end tokens before `min_tokens`.
        generator: The request's own; None where it is greedy.
    """
    logits = penalize(logits, prompt, output, params)
    if forbidden:
        logits[list(forbidden)] = -torch.inf
    if params.temperature == 0:
        return int(logits.argmax())
    logits = keep_likely(logits / params.temperature, params.top_k, params.top_p)
    return int(torch.multinomial(torch.softmax(logits, dim=0), 1, generator=generator))


def top_logprobs(logits: Tensor, token: int, count: int) -> dict[int, float]:
    """Log probabilities of the `count` most likely tokens and of `token`, most likely first."""
    logprobs = torch.log_softmax(logits, dim=0)
    values, index = logprobs.topk(min(count, len(logprobs)))
    found = dict(zip(index.tolist(), values.tolist(), strict=True))
    return found | {token: logprobs[token].item()}
