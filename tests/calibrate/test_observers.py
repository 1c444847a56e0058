"""Statistics are exact; the ranges chosen from them are those that the raw data would give."""

from __future__ import annotations

import pytest
import torch

from calibrate.observers import choose_absmax, clip_fraction
from calibrate.spec import ObserverSpec
from calibrate.tensor_statistics import Accumulator, TensorStatistics
from kernels.numerics import fake_quantize
from tests.refusals import refused, refused_recipe


def heavy_tailed(tokens=4000, channels=48, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, channels, generator=generator)
    x[:, 3] *= 6
    x[17, 5] = 90.0
    return x


def observed(
    x: torch.Tensor, name: str = "activations", *, histogram: bool = True
) -> TensorStatistics:
    seen = Accumulator(tuple(x.shape[1:]), histogram=histogram)
    seen.observe(x, name)
    return seen.statistics(name)


def test_maxima_and_counts_are_exact():
    x = heavy_tailed()
    stats = observed(x)
    assert stats.absmax == 90.0
    assert stats.tokens == 4000
    assert torch.equal(stats.channel_absmax, x.abs().amax(0))
    edges, counts = stats.histogram()
    assert counts.sum() == x.numel()
    for edge in (0.5, 1.0, 2.0, 64.0):  # powers of two are edges of bins
        assert counts[edges >= edge].sum() == (x.abs() >= edge).sum()


def observed_samples(samples) -> TensorStatistics:
    stats = TensorStatistics((48,))
    for sample in samples:
        stats.merge(observed(sample))
    return stats


def test_samples_in_any_order_on_any_ranks_give_the_same_bits():
    samples = list(heavy_tailed().split(100))
    whole = observed_samples(samples)
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    assert observed_samples(samples[::-1]) == whole
    assert observed_samples([samples[i] for i in shuffled]) == whole
    for first, second in ((0, 1), (1, 2)):  # (a + b) + c and a + (b + c)
        ranks = [observed_samples(part) for part in (samples[:12], samples[12:13], samples[13:])]
        ranks[first].merge(ranks[second])
        ranks[0].merge(ranks[2 if first == 0 else 1])
        assert ranks[0] == whole
    assert observed_samples(samples[:-1]) != whole


def test_only_what_is_kept_by_sample_depends_on_where_samples_end():
    x = heavy_tailed()
    whole = observed(x).state()
    for size in (7, 1000):
        state = observed_samples(x.split(size)).state()
        for name in ("channel_absmax", "bins", "counts", "tokens"):
            assert torch.equal(state[name], whole[name])
        assert len(state["sample_absmax"]) == -(-len(x) // size)


def test_averaged_absmax_is_the_mean_over_samples():
    spec = ObserverSpec(method="averaged_absmax")
    x = torch.ones(4, 2, 48) * torch.tensor([1.0, 2.0, 4.0, 101.0])[:, None, None]
    assert choose_absmax(observed_samples(x), spec) == 27.0
    heads = observed(torch.tensor([[[1.0] * 3, [5.0] * 3]]))
    heads.merge(observed(torch.tensor([[[3.0] * 3, [2.0] * 3]])))
    assert choose_absmax(heads, spec) == 4.0  # the larger head of each sample: 5 and 3
    assert [choose_absmax(heads.head(i), spec) for i in (0, 1)] == [2.0, 3.5]


def test_divided_keeps_only_what_follows():
    x, factor = heavy_tailed(), torch.linspace(0.5, 4, 48, dtype=torch.float64)
    got = observed(x).divided(factor)
    torch.testing.assert_close(got.channel_absmax, (x / factor).abs().amax(0).float())
    assert got.tokens == len(x)
    assert not got.counted
    for method in ("percentile", "averaged_absmax"):
        refused("needs", choose_absmax, got, ObserverSpec(method=method))


def test_statistics_of_other_shapes_do_not_merge():
    refused("shapes", observed(torch.ones(1, 3)).merge, observed(torch.ones(1, 1)))


def test_maxima_alone():
    x = heavy_tailed()
    stats = observed(x, histogram=False)
    assert torch.equal(stats.channel_absmax, observed(x).channel_absmax)
    assert stats.tokens == 4000
    assert len(stats.histogram()[0]) == 0


def test_heads_are_kept_apart():
    x = torch.randn(300, 3, 16, generator=torch.Generator().manual_seed(0))
    x[:, 2] *= 10
    stats = observed(x)
    for head in range(3):
        assert stats.head(head) == observed(x[:, head])
    assert stats.absmax == x.abs().max().item()


@pytest.mark.parametrize("share", [90.0, 99.0, 99.9, 100.0])
def test_percentile(share):
    x = heavy_tailed()
    got = choose_absmax(observed(x), ObserverSpec(method="percentile", percentile=share))
    exact = torch.quantile(x.abs().flatten()[:160_000], share / 100).item()
    assert exact * 0.99 <= got <= exact * 1.02


@pytest.mark.parametrize(("outlier", "times"), [(45.0, 1), (250.0, 40)])
def test_mse_is_the_best_of_all_ranges_on_the_raw_data(outlier, times):
    """Also where it is a tenth of the largest value: much data, and one value far beyond it."""
    x = heavy_tailed(tokens=1000)
    x[17, 5] = 0
    lone = torch.zeros(1, 48)
    lone[0, 5] = outlier
    stats = observed(lone)
    for _ in range(times):
        stats.merge(observed(x))

    def error(absmax: float) -> float:
        scale = torch.tensor(absmax / 127)
        of_x, of_lone = ((fake_quantize(y, scale) - y).double().square().sum() for y in (x, lone))
        return (times * of_x + of_lone).item()

    got = choose_absmax(stats, ObserverSpec(method="mse"))
    best = min((outlier * 2 ** (-step / 10) for step in range(80)), key=error)
    assert error(got) <= error(best) * 1.01
    assert (best < outlier / 8) == (times == 40)


def test_entropy_cuts_a_lone_outlier_and_keeps_a_uniform_range():
    assert choose_absmax(observed(heavy_tailed()), ObserverSpec(method="entropy")) < 45
    flat = torch.linspace(-1, 1, 64_000).reshape(-1, 64)
    assert choose_absmax(observed(flat), ObserverSpec(method="entropy")) > 0.9


@pytest.mark.parametrize("absmax", [90.0, 20.0, 3.0])
def test_estimates_agree_with_the_raw_data(absmax):
    x = heavy_tailed()
    stats = observed(x)
    exact = (x.abs() > absmax).float().mean().item()
    assert clip_fraction(stats, absmax) == pytest.approx(exact, rel=0.05, abs=1e-6)


@pytest.mark.parametrize("share", [90.0, 99.0, 99.9])
def test_a_percentile_clips_the_rest(share):
    x = heavy_tailed()
    stats = observed(x)
    absmax = choose_absmax(stats, ObserverSpec(method="percentile", percentile=share))
    got = clip_fraction(stats, absmax)
    assert got == pytest.approx((x.abs() >= absmax).double().mean().item(), rel=1e-12)
    assert (1 - share / 100) * 0.9 < got <= 1 - share / 100


def test_the_largest_value_clips_nothing_and_zeros_lose_nothing():
    stats = observed(heavy_tailed())
    assert clip_fraction(stats, stats.absmax) == 0.0
    zeros = observed(torch.zeros(5, 4))
    for method in ("absmax", "averaged_absmax", "percentile", "mse", "entropy"):
        assert choose_absmax(zeros, ObserverSpec(method=method)) == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_by_the_modules_name(value):
    refused_recipe("layer.7", observed, torch.tensor([[1.0, value]]), "layer.7")
