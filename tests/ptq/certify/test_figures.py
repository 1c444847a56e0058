"""Statistics of certificates: against scipy, and by simulation of models that are no worse."""

import numpy as np
import pytest
from scipy import stats

from ptq.certify.figures import MEAN_KL, SPECS, Row, judge, overall
from ptq.certify.statistics import (
    histogram,
    holm,
    mcnemar,
    mean_interval,
    quantile,
    share_interval,
    sign_flip,
)

MEANS = ("kl.prose", "kl.code", "kl.chat", "kl.at_0", "kl.at_64", "perplexity.at_0", "answers.end")
SHARES = ("answers.no_loop", "answers.ended", "objects.parse", "objects.fit", "needle.said")


def test_sign_flip_is_scipys_permutation_test() -> None:
    losses = np.random.default_rng(0).normal(0.3, 1, 12)
    expected = stats.permutation_test(
        (losses,), np.mean, permutation_type="samples", n_resamples=1 << 20, alternative="greater"
    ).pvalue
    assert sign_flip(losses) == pytest.approx(expected)
    assert sign_flip(losses, limit=5.0) == 1
    many = np.random.default_rng(1).normal(0.1, 1, 60)
    assert sign_flip(many) == pytest.approx(
        stats.ttest_1samp(many, 0, alternative="greater")[1], abs=0.02
    )
    assert sign_flip(many) == sign_flip(many)


def test_mcnemar_is_scipys_binomial_test() -> None:
    original = np.array([1.0] * 14 + [0] * 3 + [1] * 20)
    quantized = np.array([0.0] * 14 + [1] * 3 + [1] * 20)
    expected = stats.binomtest(14, 17, alternative="greater").pvalue
    assert mcnemar(original, quantized) == pytest.approx(expected)
    assert mcnemar(original, original) == 1
    low, high = share_interval(original, quantized)
    assert low < (3 - 14) / 37 < high < 0
    assert share_interval(original, original)[0] < 0 < share_interval(original, original)[1]


def test_holm_corrects_step_by_step() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])  # Holm 1979, by hand
    assert holm([0.9, 0.9]) == [1, 1]
    assert holm([]) == []


def test_quantiles_of_histograms_are_those_of_the_values() -> None:
    draw = np.random.default_rng(2)
    values = draw.lognormal(-5, 1.5, (30, 500))
    found, drawn = quantile([histogram(row) for row in values], 0.99)
    assert found == pytest.approx(np.quantile(values, 0.99), rel=0.1)
    assert np.quantile(drawn, 0.025) < found < np.quantile(drawn, 0.975)
    assert quantile([histogram(np.zeros(4))], 0.5)[0] == 0


def test_intervals_cover_the_mean() -> None:
    draw, covered = np.random.default_rng(3), 0
    for _ in range(200):
        ends = mean_interval(draw.normal(1, 1, 24))
        assert ends is not None
        covered += ends[0] < 1 < ends[1]
    assert covered >= 180
    assert mean_interval(np.ones(1)) is None


def rows(seed: int, *, loss: float, flips: float, worse: float = 0.0) -> list[Row]:
    """Cases of all kinds: KL and losses that are `loss` times their limits in the mean, and answers
    that flip either way by chance; `worse` more of those that were right turn wrong.
    """
    draw, made = np.random.default_rng(seed), []
    for i in range(36):
        values = {}
        for name in MEANS:
            spec = SPECS[name]
            limit = spec.limit * (MEAN_KL if spec.scale else 1) * loss
            if name.startswith("kl"):
                values[name] = (0.0, limit * float(draw.lognormal(-0.125, 0.5)))
            else:
                values[name] = (1.0, 1 + (-1 if spec.falls else 1) * float(draw.normal(limit, 0.3)))
        for name in SHARES:
            right = draw.random() < 0.7
            turned = draw.random() < (flips * 3 / 7 if right else flips)
            turned = turned or (right and draw.random() < worse)
            values[name] = (float(right), float(right != turned))
        counts = histogram(draw.lognormal(-4.5, 1, 400) * loss)
        made.append(Row(case=str(i), values=values, counts=counts))
    return made


@pytest.mark.parametrize("loss", [0.5, 1.0], ids=["within", "at the limit"])
def test_a_model_that_is_no_worse_is_hardly_ever_red(loss: float) -> None:
    lights = [overall(judge(rows(seed, loss=loss, flips=0.2)))[0] for seed in range(200)]
    assert lights.count("red") <= 10  # 5%
    if loss < 1:
        assert lights.count("green") > 100


def test_an_original_that_texts_mean_nothing_to_is_named() -> None:
    figures = [f for f in judge(rows(0, loss=0.1, flips=0.0)) if f.name.startswith("perplexity")]
    assert figures
    assert "Careful" not in overall(figures)[1]
    figures = [figure.model_copy(update={"original": 10.0}) for figure in figures]
    assert overall(figures)[1].endswith(
        "Careful: the original itself has a perplexity of 22,026 or more on these texts; its "
        "tokenizer may not be the one it was trained with."
    )


def test_a_worse_model_is_red_and_the_verdict_names_what_tells() -> None:
    light, told = overall(judge(rows(0, loss=3.0, flips=0.0)))
    assert light == "red"
    assert {*MEANS[:5]} <= named(told)
    light, told = overall(judge(rows(0, loss=0.1, flips=0.0, worse=0.6)))
    assert light == "red"
    assert named(told) == {*SHARES}


def named(told: str) -> set[str]:
    """The figures that a headline names."""
    return set(told.partition(": ")[2].partition(" of ")[0].split(", "))


def test_the_same_model_is_green_throughout() -> None:
    made = [
        Row(case="a", values={n: (b[0], b[0]) for n, b in row.values.items()})
        for row in rows(1, loss=0, flips=0)
    ]
    figures = judge(made)
    assert {f.verdict for f in figures} == {"green"}
    assert all(f.difference == 0 for f in figures)


def test_what_the_original_cannot_do_is_untested() -> None:
    values = {"keys.chosen": (0.0, 0.0), "keys.said": (0.0, 0.0), "keys.margin": (-1.0, -9.0)}
    figures = judge([Row(case=str(i), values=values) for i in range(20)])
    assert {f.verdict for f in figures} == {"untested"}
    assert all("original itself succeeds in 0%" in f.reason for f in figures)
    assert overall(figures)[0] == "untested"


def test_few_cases_are_untested_and_a_loss_that_may_be_chance_is_amber() -> None:
    assert judge([Row(case="0", values={"kl.chat": (0.0, 9.0)})])[0].verdict == "untested"
    apart = [(0.0, 0.3), (0.0, -0.3)] * 10 + [(0.0, 4.0), (0.0, -0.1), (0.0, 3.0)]
    figure = judge([Row(case="0", values={"perplexity.at_0": both}) for both in apart])[0]
    assert figure.verdict == "amber"
    assert "may be chance" in figure.reason


def test_length_may_neither_rise_nor_fall() -> None:
    for away in (1.0, -1.0):
        made = [
            Row(case=str(i), values={"answers.length": (3.0, 3 + away + i / 100)})
            for i in range(30)
        ]
        assert judge(made)[0].verdict == "red"
