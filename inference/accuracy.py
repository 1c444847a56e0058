"""What quantization cost: a quantized engine against the original on the same text.

Both engines score every sequence on their real kernels, cache included; logits are compared in
fp64, one sequence after the other (`kernels.logits`). For row i of a sequence's logits, with p the
original's and q the quantized model's distribution over the vocabulary and x the token that
follows:

    nll_i = -ln p(x)        perplexity = exp(mean nll)        KL_i = sum_v p(v) ln(p(v) / q(v))

Tokens of one text depend on each other, so intervals come from resampling whole sequences: the
percentile bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13).
One draw of sequences gives both perplexities and their ratio, which makes the ratio's interval a
paired one (Koehn, "Statistical Significance Tests for Machine Translation Evaluation", EMNLP 2004):
what the text itself makes hard cancels out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from formats.documents import Strict
from formats.errors import EngineError, RequestError
from kernels.logits import compare_rows

RESAMPLES = 4000
SEED = 0
FIRST_BUCKET = 16
STRANGE = 1000  # perplexity of a model that a text means nothing to

Interval = tuple[float, float]


class Scorer(Protocol):
    """What is needed of an engine; `inference.engine.Engine` is one."""

    def score(self, ids: Tensor) -> Tensor:
        """Logits fp32 [T, vocabulary] of token ids [T], on any device."""
        ...


class PositionBucket(Strict):
    """Results of the predictions made at positions [start, end) of their sequences.

    Position i is a prediction from i + 1 tokens of context. Intervals (`_ci`) are 95% ones; None
    where fewer than two sequences are that long.
    """

    start: int
    end: int
    tokens: int
    perplexity_original: float
    perplexity_quantized: float
    kl_mean: float
    kl_ci: Interval | None
    top1_agreement: float
    top1_ci: Interval | None


class Accuracy(Strict):
    """Accuracy of a quantized model against its original.

    Intervals (`_ci`) are 95% ones; None where there is only one sequence to tell them from.

    Attributes:
        sequences: Sequences compared.
        tokens: Predictions compared: every token but the first of each sequence.
        perplexity_original: exp of the mean negative log-likelihood, natural logarithm.
        perplexity_quantized: The same of the quantized model.
        perplexity_ratio: Quantized over original; 1 is no loss.
        kl_mean: Mean KL(original || quantized) in nats; 0 is no loss.
        kl_p50: Its median over all predictions; beside it the 90th and 99th percentile and the
            largest value.
        top1_agreement: Share of predictions where both have the same most likely token.
        top5_agreement: Share of the original's 5 most likely tokens that are among the quantized
            model's 5 most likely, in any order, averaged over predictions.
        positions: The same by position in the sequence.
    """

    sequences: int
    tokens: int
    perplexity_original: float
    perplexity_original_ci: Interval | None
    perplexity_quantized: float
    perplexity_quantized_ci: Interval | None
    perplexity_ratio: float
    perplexity_ratio_ci: Interval | None
    kl_mean: float
    kl_mean_ci: Interval | None
    kl_p50: float
    kl_p90: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    top1_agreement_ci: Interval | None
    top5_agreement: float
    positions: tuple[PositionBucket, ...]


@dataclass(frozen=True)
class SequenceScores:
    """Results of one sequence of T tokens, each fp64 [T - 1] in the order of its predictions, on
    the host.

    Attributes:
        nll_original: Negative log-likelihood of the token that follows.
        nll_quantized: The same of the quantized model.
        kl: KL(original || quantized).
        top1: 1 where both have the same most likely token, else 0.
        top5: Share of the 5 most likely tokens that both have in common.
    """

    nll_original: Tensor
    nll_quantized: Tensor
    kl: Tensor
    top1: Tensor
    top5: Tensor

    def part(self, start: int, end: int) -> SequenceScores:
        """Results of the predictions made at positions [start, end)."""
        return SequenceScores(*(getattr(self, field.name)[start:end] for field in fields(self)))


def compare(original: Scorer, quantized: Scorer, sequences: Sequence[Tensor]) -> Accuracy:
    """Score sequences with both engines and compare what they predict.

    Args:
        original: The reference.
        quantized: What is judged.
        sequences: Token ids, int64 [T] each, T at least 2.

    Raises:
        RequestError: there is no sequence, or one has no token to predict.
        EngineError: logits hold NaN or infinity, or the vocabularies differ.
    """
    check_sequences(sequences)
    return summarize([score(original, quantized, ids, i) for i, ids in enumerate(sequences)])


def check_sequences(sequences: Sequence[Tensor]) -> None:
    """Refuse what tells nothing of two models.

    Raises:
        RequestError: there is no sequence, or one has no token to predict.
    """
    short = [i for i, ids in enumerate(sequences) if len(ids) < 2]
    if short or not sequences:
        found = f"sequence {short[0]} has fewer than 2 tokens" if short else "there are none"
        raise RequestError(
            f"sequences: {found}; a comparison needs at least one, of 2 tokens or more", "sequences"
        )


def score(original: Scorer, quantized: Scorer, ids: Tensor, number: int) -> SequenceScores:
    """What both engines predict for one sequence.

    Args:
        original: The reference.
        quantized: What is judged.
        ids: Token ids, int64 [T].
        number: Of the sequence, for the error's text.

    Raises:
        EngineError: logits hold NaN or infinity, or the vocabularies differ.
    """
    where = f"sequence {number} ({len(ids)} tokens)"
    both = original.score(ids), quantized.score(ids)
    if both[0].shape != both[1].shape:
        raise EngineError(
            f"{where}: logits are {tuple(both[0].shape)} of the original and "
            f"{tuple(both[1].shape)} of the quantized model; compare models with one vocabulary"
        )
    return _finite(compare_logits(*both, ids), where, *both)


def _finite(
    found: SequenceScores, where: str, original: Tensor, quantized: Tensor
) -> SequenceScores:
    """Results of two models' logits, refused where these hold NaN or infinity."""
    if torch.isfinite(found.nll_original + found.nll_quantized + found.kl).all():
        return found
    both = {"original": original, "quantized": quantized}
    bad = {name: (~torch.isfinite(x).all(-1)).nonzero() for name, x in both.items()}
    name, rows = next(found for found in bad.items() if len(found[1]))
    raise EngineError(
        f"{where}: the {name} model's logits hold NaN or infinity from position {int(rows[0])} on; "
        "check its checkpoint with `ptq inspect`"
    )


def score_long(original: Any, quantized: Any, ids: Tensor, start: int) -> Accuracy:
    """Compare two engines on the predictions from a position on of one long text, whose logits are
    never there at once.

    Args:
        original: An `inference.engine.Engine`.
        quantized: Another one, with steps of as many tokens.
        ids: Token ids, int64 [T].
        start: The first position.

    Raises:
        EngineError: logits hold NaN or infinity.
    """
    found, at = list[SequenceScores](), 0
    for p, q in zip(original.score_parts(ids), quantized.score_parts(ids), strict=True):
        targets = ids[at + 1 : at + 1 + len(p)]
        if len(targets):  # nothing follows the last token
            scores = compare_predictions(p[: len(targets)], q[: len(targets)], targets)
            where = f"a text of {len(ids)} tokens, those from {at} on"
            found.append(_finite(scores, where, p, q).part(max(0, start - at), len(targets)))
        at += len(p)
    return summarize([_joined(found)])


def _joined(scores: Sequence[SequenceScores]) -> SequenceScores:
    """Results of several texts, or parts of one, as those of one."""
    names = [field.name for field in fields(SequenceScores)]
    return SequenceScores(*(torch.cat([getattr(s, name) for s in scores]) for name in names))


def compare_logits(original: Tensor, quantized: Tensor, ids: Tensor) -> SequenceScores:
    """Compare two models' logits for one text; figures of a row are not finite where its are not.

    Args:
        original: fp32 [T, vocabulary]; row i predicts token i + 1.
        quantized: Of the quantized model, of the same shape.
        ids: Token ids int64 [T].
    """
    return compare_predictions(original[:-1], quantized[:-1], ids[1:])


def compare_predictions(original: Tensor, quantized: Tensor, targets: Tensor) -> SequenceScores:
    """`compare_logits`, where row i predicts target i: logits fp32 [n, vocabulary], int64 [n]."""
    return SequenceScores(*compare_rows(original, quantized, targets).cpu())


def summarize(scores: Sequence[SequenceScores]) -> Accuracy:
    """Put the results of all sequences together."""
    own = _joined(scores)
    original, quantized, kl = own.nll_original.mean(), own.nll_quantized.mean(), own.kl
    p50, p90, p99 = np.quantile(kl.numpy(), [0.5, 0.9, 0.99]).tolist()
    ends = _intervals(scores)
    return Accuracy(
        sequences=len(scores),
        tokens=len(kl),
        perplexity_original=original.exp().item(),
        perplexity_original_ci=ends[0],
        perplexity_quantized=quantized.exp().item(),
        perplexity_quantized_ci=ends[1],
        perplexity_ratio=(quantized - original).exp().item(),
        perplexity_ratio_ci=ends[2],
        kl_mean=kl.mean().item(),
        kl_mean_ci=ends[3],
        kl_p50=p50,
        kl_p90=p90,
        kl_p99=p99,
        kl_max=kl.max().item(),
        top1_agreement=own.top1.mean().item(),
        top1_agreement_ci=ends[4],
        top5_agreement=own.top5.mean().item(),
        positions=_by_position(scores),
    )


def _intervals(scores: Sequence[SequenceScores]) -> list[Interval | None]:
    """Bootstrap intervals of both perplexities, their ratio, mean KL divergence and agreement."""
    if len(scores) < 2:
        return [None] * 5
    drawn = _resampled_means(scores, "nll_original", "nll_quantized", "kl", "top1")
    original, quantized, kl, top1 = drawn.T
    perplexities = original.exp(), quantized.exp(), (quantized - original).exp()
    return [percentile_interval(values) for values in (*perplexities, kl, top1)]


def _resampled_means(scores: Sequence[SequenceScores], *names: str) -> Tensor:
    """Means over the predictions of sequences drawn with replacement: fp64 [draws, names]."""
    sums = torch.tensor(
        [[*(getattr(s, name).sum() for name in names), len(s.kl)] for s in scores],
        dtype=torch.float64,
    )  # [sequences, names + 1]
    drawn = resampled_sums(sums)
    return drawn[:, :-1] / drawn[:, -1:]


def resampled_sums(sums: Tensor) -> Tensor:
    """Column sums of sequences drawn with replacement.

    Args:
        sums: One row a sequence: fp64 [sequences, columns].

    Returns:
        One row a draw of as many sequences: fp64 [RESAMPLES, columns]. The draws are always the
        same ones.
    """
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.zeros(RESAMPLES, sums.shape[1], dtype=torch.float64)
    for _ in range(len(sums)):  # one draw at a time keeps memory small
        drawn += sums[torch.randint(len(sums), (RESAMPLES,), generator=generator)]
    return drawn


def percentile_interval(values: Tensor) -> Interval:
    """The middle 95% of bootstrap values, which may be infinite."""
    low, high = np.quantile(values.numpy(), [0.025, 0.975], method="inverted_cdf").tolist()
    return low, high


def _by_position(scores: Sequence[SequenceScores]) -> tuple[PositionBucket, ...]:
    """Buckets [0, 16), [16, 32), [32, 64), ... up to the longest sequence."""
    longest = max(len(score.kl) for score in scores)
    buckets, start, end = [], 0, FIRST_BUCKET
    while start < longest:
        parts = [score.part(start, end) for score in scores if len(score.kl) > start]
        own = _joined(parts)
        ends = [None, None]
        if len(parts) > 1:
            ends = [percentile_interval(x) for x in _resampled_means(parts, "kl", "top1").T]
        buckets.append(
            PositionBucket(
                start=start,
                end=min(end, longest),
                tokens=len(own.kl),
                perplexity_original=own.nll_original.mean().exp().item(),
                perplexity_quantized=own.nll_quantized.mean().exp().item(),
                kl_mean=own.kl.mean().item(),
                kl_ci=ends[0],
                top1_agreement=own.top1.mean().item(),
                top1_ci=ends[1],
            )
        )
        start, end = end, 2 * end
    return tuple(buckets)
