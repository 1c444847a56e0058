"""From logits to the next token.

    x = (penalized logits + bias, of the tokens that may come) / temperature
    keep the top_k largest;  of those the fewest whose probabilities, relative to what top_k kept,
    sum to at least top_p;  of those the ones at least min_p times as likely as the largest;  draw

It is drawn by noise of (seed, step, token), `kernels.gumbel_noise`: as on a GPU.

min_p comes last, as in transformers; what it keeps of a set does not depend on how probabilities
are normalized, so that without top_p its place does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference.requests.request import SamplingParams
from inference.scheduling.sequence import Biases, Draw
from kernels.gumbel_noise import draw

Floats, Ints = NDArray[np.float32], NDArray[np.int64]
FIRST_CANDIDATES = 64  # tokens that top_p looks at first; more where they are not enough
ROWS_AT_ONCE = 256  # rows whose log probabilities are in memory together


def penalize(
    logits: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> Tensor:
    """Apply repetition, presence and frequency penalties; see `SamplingParams`.

    Args:
        logits: fp32 [vocabulary].
        output: Generated tokens.

    Returns:
        New logits, or the same where there is nothing to do.
    """
    counted = output and (params.presence_penalty or params.frequency_penalty)
    if not counted and params.repetition_penalty == 1.0:
        return logits
    logits = logits.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(list({*prompt, *output}))
        value = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(value > 0, value / factor, value * factor)
    if counted:
        tokens, counts = torch.tensor(output).unique(return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    return logits


def permit(
    logits: Tensor, params: SamplingParams, forbidden: Sequence[int], mask: np.ndarray | None
) -> Tensor:
    """Add the request's bias, and set the logits of tokens that may not come to minus infinity.

    Args:
        logits: fp32 [vocabulary].
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


def keep_likely(x: Floats, top_k: int, top_p: float, floor: float = -math.inf) -> Ints:
    """Ids of the likely tokens, ascending.

    Only as many tokens are sorted as may be kept; the vocabulary as a whole never is. Probability
    is counted in whole 2^-40ths of the largest, so that sums are the same in any order.

    Args:
        x: Logits [vocabulary], after temperature.
        top_k: Most tokens to keep, 0 for all; the lower ids of equals.
        top_p: Of those, keep the fewest whose probabilities sum to at least this.
        floor: Of those, keep the ones at least this far above the largest: log of min_p.
    """
    top_k = 0 if top_k >= len(x) else top_k
    most = x.max()
    if top_k == 0 and top_p == 1.0:
        return np.flatnonzero(x >= most + np.float32(floor))
    count = min(top_k or FIRST_CANDIDATES, len(x))
    total = 0 if top_k else int(_mass(x, most).sum())
    while True:
        index = _largest(x, count)
        mass = _mass(x[index], most)
        before = np.cumsum(mass) - mass
        share = math.inf if top_p == 1.0 else float(np.float32(top_p))
        enough = (total or int(mass.sum())) * share
        keep = before < enough
        if top_k or count == len(x) or not keep[-1]:
            break
        count = min(8 * count, len(x))
    index = index[keep]
    return np.sort(index[x[index] >= most + np.float32(floor)])


def _mass(x: Floats, most: np.floating) -> Ints:
    """Probabilities in whole 2^-40ths of that of the largest."""
    return (np.exp(x - most) * np.float32(2.0**40)).astype(np.int64)


def _largest(x: Floats, count: int) -> Ints:
    """Ids of the largest logits, descending; of equals the lower ids, in order."""
    least = np.partition(x, len(x) - count)[len(x) - count]
    index = np.flatnonzero(x >= least)
    return index[np.argsort(-x[index], kind="stable")][:count]


def log_min_p(min_p: float) -> float:
    """How far, in logits, the least that `min_p` keeps is from the largest; at most 0."""
    return math.log(min_p) if min_p > 0 else -math.inf


def sample(
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    forbidden: Sequence[int],
    seed: int,
    mask: np.ndarray | None = None,
) -> int:
    """Choose the next token of one request.

    Args:
        logits: fp32 [vocabulary].
        output: Generated tokens.
        forbidden: Tokens that may not come now: end tokens before `min_tokens`.
        seed: Of its random numbers.
        mask: int32 [ceil(vocabulary / 32)]: bit i % 32 of word i // 32 is set where token i may
            come; None where all may.

    Returns:
        The token; -1 where none may come.
    """
    logits = permit(penalize(logits, prompt, output, params), params, forbidden, mask)
    floor = log_min_p(params.min_p)
    own = Draw(params.temperature, params.top_p, params.top_k, floor, seed)
    return draw_token(logits.numpy(), own, len(output))


def draw_token(logits: Floats, own: Draw, step: int) -> int:
    """The likeliest token, or one that is drawn from the likely ones; -1 where none may come.

    It depends on nothing but the arguments, and is the same on every device.

    Args:
        logits: fp32 [vocabulary], edited.
        own: How the request's tokens are chosen.
        step: How many of them there are.
    """
    top = int(logits.argmax())
    if not math.isfinite(logits[top]):
        return -1
    if own.temperature == 0:
        return top
    x = logits / np.float32(own.temperature)
    kept = keep_likely(x, own.top_k, own.top_p, own.log_min_p)
    return draw(x[kept], kept, own.seeds, step)


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
        The `count` most likely tokens of each row, most likely first, and its own after them:
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
