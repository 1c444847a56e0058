"""From logits to the next token.

    x = (penalized logits + bias, of the tokens that may come) / temperature
    keep the top_k largest;  of those the fewest whose probabilities, relative to what top_k kept,
    sum to at least top_p;  of those the ones at least min_p times as likely as the largest;  draw

min_p comes last, as in transformers; what it keeps of a set does not depend on how probabilities
are normalized, so that without top_p its place does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from inference.requests.request import SamplingParams
from inference.scheduling.sequence import Biases

FIRST_CANDIDATES = 64  # tokens that top_p looks at first; more where they are not enough
ROWS_AT_ONCE = 256  # rows whose log probabilities are in memory together


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


def permit(
    logits: Tensor, params: SamplingParams, forbidden: Sequence[int], mask: np.ndarray | None
) -> Tensor:
    """Add the request's bias, and set the logits of tokens that may not come to minus infinity.

    Args:
        logits: fp32 [vocabulary].
        params: The request's.
        forbidden: Tokens that may not come.
        mask: As in `sample`.

    Returns:
        New logits, or the same where there is nothing to do.
    """
    if not (params.logit_bias or forbidden or mask is not None):
        return logits
    logits = logits.clone()
    if params.logit_bias:
        tokens, values = zip(*params.logit_bias, strict=True)
        logits[list(tokens)] += torch.tensor(values)
    if forbidden:
        logits[list(forbidden)] = -torch.inf
    if mask is not None:
        bits = np.unpackbits(mask.view(np.uint8), count=len(logits), bitorder="little")
        logits.masked_fill_(torch.from_numpy(bits == 0), -torch.inf)
    return logits


def biases_of(params: SamplingParams, ends: Collection[int]) -> Biases | None:
    """What is added to a request's logits: its bias, and what forbids its ends at first.

    Args:
        params: The request's.
        ends: Tokens that end it.
    """
    early = sorted(ends) if params.min_tokens and params.constraint is None else []
    own = sorted(params.logit_bias, key=lambda pair: pair[0] in early)  # those of ends come last
    if not (early or own):
        return None
    always = sum(token not in early for token, _ in own)
    return Biases(
        tokens=(*early, *(token for token, _ in own)),
        values=(*[-math.inf] * len(early), *(value for _, value in own)),
        early=(0, len(early) + always),
        late=(len(early), len(early) + len(own)),
        until=params.min_tokens,
    )


def keep_likely(logits: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Set the logits of all but the likely tokens to minus infinity.

    Only as many tokens are sorted as may be kept; the vocabulary as a whole never is.

    Args:
        logits: fp32 [vocabulary], after temperature.
        top_k: Most tokens to keep, 0 for all; the lower ids of equals.
        top_p: Of those, keep the fewest whose probabilities sum to at least this.
        min_p: Of those, keep the ones that are at least so many times as likely as the largest.
    """
    if min_p > 0:
        logits = _keep_likely(logits, top_k, top_p)
        return logits.masked_fill(logits < logits.max() + log_min_p(min_p), -torch.inf)
    return _keep_likely(logits, top_k, top_p)


def log_min_p(min_p: float) -> float:
    """How far, in logits, the least that `min_p` keeps lies from the largest; at most 0."""
    return math.log(min_p) if min_p > 0 else -math.inf


def _keep_likely(logits: Tensor, top_k: int, top_p: float) -> Tensor:
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
    mask: np.ndarray | None = None,
) -> int:
    """Choose the next token of one request.

    Args:
        logits: fp32 [vocabulary].
        prompt: Tokens of the prompt.
        output: Generated tokens.
        params: The request's.
        forbidden: Tokens that may not come now: end tokens before `min_tokens`.
        generator: The request's own; None where it is greedy.
        mask: int32 [ceil(vocabulary / 32)]: bit i % 32 of word i // 32 is set where token i may
            come; None where all may.
    """
    logits = permit(penalize(logits, prompt, output, params), params, forbidden, mask)
    if params.temperature == 0:
        return int(logits.argmax())
    logits = logits / params.temperature
    logits = keep_likely(logits, params.top_k, params.top_p, params.min_p)
    return int(torch.multinomial(torch.softmax(logits, dim=0), 1, generator=generator))


def top_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[dict[int, float]]:
    """Log probabilities of the `count` most likely tokens of each row and of its own token.

    A row's are the same bits in any company.

    Args:
        logits: Finite fp32 [rows, vocabulary], on any device.
        tokens: One for each row.
        count: Tokens beside it.

    Returns:
        For each row {token: log probability}, finite, most likely first, its own token last unless
        it is among them.
    """
    found: list[dict[int, float]] = []
    for start in range(0, len(tokens), ROWS_AT_ONCE):
        own = torch.tensor(tokens[start : start + ROWS_AT_ONCE], device=logits.device)
        index, values = rank(logits[start : start + len(own)], own, count)
        rows = zip(index.tolist(), values.tolist(), strict=True)
        found += [dict(zip(*row, strict=True)) for row in rows]
    return found


def rank(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`top_logprobs` as tensors, without waiting for a device.

    Args:
        logits: fp32 [rows, vocabulary].
        tokens: int64 [rows].
        count: Tokens beside them.

    Returns:
        The `count` most likely tokens of each row, most likely first, and its own behind them:
        int64 and fp32, both [rows, min(count, vocabulary) + 1].
    """
    logprobs = torch.log_softmax(logits, dim=1)
    best = logprobs.topk(min(count, logprobs.shape[1])).indices
    index = torch.cat([best, tokens[:, None]], dim=1)
    return index, logprobs.gather(1, index).clamp(min=torch.finfo(torch.float32).min)


def likeliest(logits: Tensor, count: int) -> dict[int, float]:
    """Log probabilities of the `count` most likely tokens, finite, most likely first.

    Args:
        logits: Finite fp32 [vocabulary].
        count: How many; all of a smaller vocabulary.
    """
    values, index = torch.log_softmax(logits, dim=0).topk(min(count, len(logits)))
    values = values.clamp(min=torch.finfo(torch.float32).min)
    return dict(zip(index.tolist(), values.tolist(), strict=True))
