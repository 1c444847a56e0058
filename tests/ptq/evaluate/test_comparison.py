"""Two models compared by several workers: the figures of one, failures named."""

import pytest
import torch

from formats.errors import EngineError, RequestError
from inference.accuracy import compare
from ptq.evaluate.comparison import compare_on


class Scores:
    """Gives logits that follow from the tokens alone."""

    def __init__(self, seed: int, *, broken: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(50, 32, generator=generator)
        self.broken, self.scored = broken, 0

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        self.scored += 1
        logits = self.table[ids]
        return logits * torch.nan if int(ids[0]) == self.broken else logits


SEQUENCES = [torch.arange(i, i + 5 + i % 3) for i in range(7)]


def test_the_number_of_workers_decides_nothing():
    expected = compare(Scores(1), Scores(2), SEQUENCES)
    assert expected.kl_mean > 0.1
    for count in (1, 2, 3):
        loaded: list[Scores] = []

        def load(device: str, loaded: list[Scores] = loaded) -> tuple[Scores, Scores]:
            assert device == "cpu"
            pair = Scores(1), Scores(2)
            loaded += pair
            return pair

        assert compare_on(["cpu"] * count, load, SEQUENCES) == expected
        assert len(loaded) == 2 * count
        shares = sorted(model.scored for model in loaded)
        assert sum(shares) == 2 * len(SEQUENCES)
        assert shares[-1] - shares[0] <= 1


def test_a_worker_that_fails_is_named():
    with pytest.raises(EngineError, match=r"sequence 3 .*quantized model") as caught:
        compare_on(["cpu"] * 2, lambda _: (Scores(1), Scores(2, broken=3)), SEQUENCES)
    told = "It happened on worker 2 of 2 on cpu, comparing both models."
    assert caught.value.__notes__ == [told]


def test_nothing_to_compare_is_refused_before_a_model_is_loaded():
    def load(_: str) -> tuple[Scores, Scores]:
        raise AssertionError("loaded")

    with pytest.raises(RequestError, match="fewer than 2 tokens"):
        compare_on(["cpu"] * 2, load, [torch.tensor([1])])
