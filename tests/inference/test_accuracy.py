"""Accuracy figures against sums written out, and the bootstrap's intervals against known ones."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from formats.errors import EngineError, RequestError
from inference.accuracy import (
    SequenceScores,
    compare,
    compare_logits,
    percentile_interval,
    resampled_sums,
    score,
    score_long,
    summarize,
)
from tests.inference.engines import engine_of

VOCABULARY = 11


class Fake:
    """An engine whose logits are a function of the tokens."""

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        self.score = logits
        self.score_parts = lambda ids: iter(logits(ids).split(8))


def logits_of(ids: Tensor, seed: int = 0, noise: float = 0.0) -> Tensor:
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    other = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(99))
    position = torch.arange(len(ids))[:, None] / 10
    return 2 * table[ids] + position + noise * other[ids]


def some_sequences(lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths]


def engines(noise: float) -> tuple[Fake, Fake]:
    return Fake(logits_of), Fake(lambda ids: logits_of(ids, noise=noise))


def test_equal_models_lose_nothing():
    accuracy = compare(*engines(0.0), some_sequences((5, 40, 17)))
    assert accuracy.perplexity_ratio == 1.0
    assert accuracy.perplexity_ratio_ci == (1.0, 1.0)
    assert accuracy.kl_mean == accuracy.kl_max == 0.0
    assert accuracy.top1_agreement == accuracy.top5_agreement == 1.0
    assert accuracy.perplexity_original == accuracy.perplexity_quantized
    assert (accuracy.sequences, accuracy.tokens) == (3, 4 + 39 + 16)


def test_figures_are_the_sums_written_out():
    sequences = some_sequences((2, 33, 20))
    original, quantized = engines(0.7)
    nll, nll_q, kl, top1, top5 = [], [], [], [], []
    for ids in sequences:
        for i in range(len(ids) - 1):
            p, q = (e.score(ids)[i].tolist() for e in (original, quantized))
            zp, zq = (math.log(math.fsum(map(math.exp, x))) for x in (p, q))
            nll.append(zp - p[ids[i + 1]])
            nll_q.append(zq - q[ids[i + 1]])
            kl.append(
                math.fsum(
                    math.exp(a - zp) * ((a - zp) - (b - zq)) for a, b in zip(p, q, strict=True)
                )
            )
            order_p, order_q = (sorted(range(VOCABULARY), key=x.__getitem__)[::-1] for x in (p, q))
            top1.append(order_p[0] == order_q[0])
            top5.append(len(set(order_p[:5]) & set(order_q[:5])) / 5)
    accuracy = compare(original, quantized, sequences)
    n = len(nll)
    assert accuracy.tokens == n == 1 + 32 + 19
    assert accuracy.perplexity_original == pytest.approx(math.exp(sum(nll) / n), rel=1e-6)
    assert accuracy.perplexity_quantized == pytest.approx(math.exp(sum(nll_q) / n), rel=1e-6)
    assert accuracy.perplexity_ratio == pytest.approx(
        accuracy.perplexity_quantized / accuracy.perplexity_original, rel=1e-12
    )
    assert accuracy.kl_mean == pytest.approx(sum(kl) / n, rel=1e-5)
    assert accuracy.kl_max == pytest.approx(max(kl), rel=1e-5)
    assert accuracy.kl_p50 == pytest.approx(torch.tensor(kl).quantile(0.5).item(), rel=1e-4)
    assert accuracy.kl_p50 < accuracy.kl_p90 < accuracy.kl_p99 < accuracy.kl_max
    assert accuracy.top1_agreement == pytest.approx(sum(top1) / n)
    assert accuracy.top5_agreement == pytest.approx(sum(top5) / n)
    assert 0.0 < accuracy.top1_agreement < 1.0


def test_positions_are_parts_of_the_whole():
    accuracy = compare(*engines(0.5), some_sequences((70, 20)))
    assert [(b.start, b.end, b.tokens) for b in accuracy.positions] == [
        (0, 16, 32),
        (16, 32, 16 + 3),
        (32, 64, 32),
        (64, 69, 5),
    ]
    whole = sum(b.kl_mean * b.tokens for b in accuracy.positions) / accuracy.tokens
    assert whole == pytest.approx(accuracy.kl_mean, rel=1e-12)


@pytest.mark.parametrize(("start", "length"), [(0, 30), (3, 30), (12, 30), (20, 30), (3, 25)])
def test_a_long_text_is_compared_a_step_at_a_time(start, length):
    """Eight tokens each, of 25 the last alone; its figures are those of the whole from a position on."""
    (ids,) = some_sequences((length,))
    both = engines(0.4)
    whole = summarize([score(*both, ids, 0).part(start, length - 1)])
    found = score_long(*both, ids, start)
    assert found.tokens == length - 1 - start
    assert found.kl_mean == pytest.approx(whole.kl_mean, rel=1e-12)
    assert found.perplexity_ratio == pytest.approx(whole.perplexity_ratio, rel=1e-12)


def test_a_long_text_with_nan_is_refused():
    broken = Fake(lambda ids: logits_of(ids).index_fill(0, torch.tensor([20]), math.nan))
    with pytest.raises(EngineError, match="those from 16 on: the quantized model.* position 4 on"):
        score_long(Fake(logits_of), broken, *some_sequences((30,)), 3)


@pytest.fixture
def by_torch(monkeypatch) -> None:
    """Rows are compared as on a GPU, some at a time."""
    monkeypatch.setattr("kernels.cpu.native.library", lambda: None)


def test_chunks_do_not_change_a_result(monkeypatch, by_torch):
    ids = some_sequences((50,))[0]
    whole = compare_logits(logits_of(ids), logits_of(ids, noise=0.3), ids)
    monkeypatch.setattr("kernels.logits.CHUNK_ELEMENTS", 3 * VOCABULARY)
    parts = compare_logits(logits_of(ids), logits_of(ids, noise=0.3), ids)
    assert torch.allclose(whole.kl, parts.kl, rtol=1e-12)
    assert torch.equal(whole.top5, parts.top5)


class Widest(TorchDispatchMode):
    """The most elements that a tensor of fp64 has had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float64:
                self.elements = max(self.elements, tensor.numel())
        return made


def test_no_more_is_widened_at_a_time_than_caches_hold(by_torch):
    logits = torch.randn(130, 20_000, generator=torch.Generator().manual_seed(6))
    with Widest() as widest:
        score(Fake(lambda _: logits), Fake(lambda _: logits + 0.1), torch.arange(130), 0)
    assert 20_000 <= widest.elements <= 1 << 20


@pytest.mark.parametrize("compiled", [True, False])
def test_divergences_are_those_of_distributions(compiled, request):
    if not compiled:
        request.getfixturevalue("by_torch")
    ids = some_sequences((50,))[0]
    pair = logits_of(ids), logits_of(ids, noise=0.3)
    apart = torch.nn.functional.kl_div(
        *(x.double().log_softmax(-1) for x in reversed(pair)), reduction="none", log_target=True
    )
    found = compare_logits(*pair, ids).kl
    torch.testing.assert_close(found, apart.sum(-1)[:-1], rtol=1e-12, atol=1e-15)


def test_a_small_vocabulary_has_fewer_than_five_to_agree_on():
    ids = torch.tensor([0, 1, 2, 0])
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(4, 3)
    assert compare_logits(logits, logits, ids).top5.tolist() == [1.0, 1.0, 1.0]


def test_the_ratio_of_paired_models_is_known_better_than_their_perplexities():
    accuracy = compare(*engines(0.1), some_sequences((40,) * 30))
    assert accuracy.perplexity_ratio_ci is not None
    assert accuracy.perplexity_original_ci is not None
    low, high = accuracy.perplexity_ratio_ci
    assert low < accuracy.perplexity_ratio < high
    wide = accuracy.perplexity_original_ci
    assert (high - low) < (wide[1] - wide[0]) / accuracy.perplexity_original / 3


def test_one_sequence_tells_no_interval():
    accuracy = compare(*engines(0.1), some_sequences((40,)))
    assert accuracy.perplexity_ratio_ci is None
    assert accuracy.kl_mean_ci is None


def test_equal_runs_give_equal_intervals():
    sequences = some_sequences((12, 30, 25))
    assert compare(*engines(0.4), sequences) == compare(*engines(0.4), sequences)


def test_intervals_cover_the_truth_about_95_times_of_100():
    generator = torch.Generator().manual_seed(3)
    inside = 0
    for _ in range(200):
        values = 5 + 2 * torch.randn(40, 1, generator=generator, dtype=torch.float64)
        low, high = percentile_interval(resampled_sums(values)[:, 0] / len(values))
        inside += low <= 5 <= high
    assert 0.88 <= inside / 200 <= 0.99


def test_intervals_are_as_wide_as_the_standard_error_says():
    values = torch.randn(100, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    low, high = percentile_interval(resampled_sums(values)[:, 0] / 100)
    assert (high - low) == pytest.approx(2 * 1.96 * values.std().item() / 10, rel=0.1)


def test_a_broken_model_is_infinitely_worse_rather_than_an_overflow():
    fine = torch.ones(3, dtype=torch.float64)
    broken = SequenceScores(fine, 1e4 * fine, 1e4 * fine, 0 * fine, 0 * fine)
    assert summarize([broken, broken]).perplexity_ratio == math.inf


@pytest.mark.parametrize("which", ["original", "quantized"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_name_the_model_and_the_sequence(which, value):
    def damaged(ids: Tensor) -> Tensor:
        logits = logits_of(ids)
        if len(ids) == 9:
            logits[4:, 2] = value
        return logits

    good, bad = Fake(logits_of), Fake(damaged)
    pair = (bad, good) if which == "original" else (good, bad)
    with pytest.raises(EngineError, match=rf"sequence 1 \(9 tokens\): the {which} .* position 4"):
        compare(*pair, some_sequences((5, 9, 7)))


def test_models_of_different_vocabularies_are_refused():
    with pytest.raises(EngineError, match="one vocabulary"):
        compare(Fake(logits_of), Fake(lambda ids: logits_of(ids)[:, :-1]), some_sequences((5,)))


@pytest.mark.parametrize(("lengths", "found"), [((), "there are none"), ((4, 1), "sequence 1")])
def test_nothing_to_predict_is_refused(lengths, found):
    with pytest.raises(RequestError, match=found) as caught:
        compare(*engines(0.0), some_sequences(lengths))
    assert caught.value.param == "sequences"


def test_real_engines(tiny_llama, make_quantized):
    original, quantized = (
        engine_of(folder, max_batch_size=1, max_model_len=64)
        for folder in (tiny_llama, make_quantized(tiny_llama))
    )
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(384, (n,), generator=generator) for n in (64, 20)]
    same = compare(original, original, sequences)
    assert (same.kl_max, same.perplexity_ratio, same.top1_agreement) == (0.0, 1.0, 1.0)
    accuracy = compare(original, quantized, sequences)
    assert accuracy.kl_mean > 0.0
    assert accuracy.perplexity_original == same.perplexity_original
