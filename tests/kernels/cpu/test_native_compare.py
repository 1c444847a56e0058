"""Rows of logits that are compared by the compiled kernel, against torch's own ops."""

import math

import pytest
import torch

from kernels.cpu import native
from kernels.logits import compare_rows

pytestmark = pytest.mark.skipif(not native.supported(), reason="no C++ compiler")


@pytest.mark.parametrize("vocabulary", [1, 3, 5, 37, 1024, 50_001])
@pytest.mark.parametrize("noise", [0.0, 1e-4, 1.0])
def test_rows_give_what_torch_says(vocabulary, noise, isa, monkeypatch):
    generator = torch.Generator().manual_seed(vocabulary)
    p = 5 * torch.randn(9, vocabulary, generator=generator)
    p[0] -= 3e4  # what is far below the largest adds nothing, wherever both are
    p[1, vocabulary // 2] += 900
    q = p + noise * torch.randn(p.shape, generator=generator)
    targets = torch.randint(vocabulary, (9,), generator=generator)
    found = compare_rows(p, q, targets)
    monkeypatch.setattr(native, "library", lambda: None)
    wanted = compare_rows(p, q, targets)
    torch.testing.assert_close(found[:3], wanted[:3], rtol=1e-12, atol=1e-12)
    assert torch.equal(found[3:], wanted[3:])
    if noise == 0.0:
        assert not found[2].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 33, 38])
def test_rows_that_are_not_finite_give_no_figure(bad, place, isa):
    """As a whole: which of the figures it is does not matter."""
    p, q = torch.randn(2, 39), torch.randn(2, 39)
    p[1, place] = bad
    for pair in ((p, q), (q, p)):
        finite = compare_rows(*pair, torch.tensor([1, 2])).isfinite().all(0)
        assert finite.tolist() == [True, False]


def test_the_first_of_equal_logits_is_the_more_likely_token(isa):
    p = torch.zeros(1, 40)
    q = p.clone()
    q[0, 7:] -= 1.0
    found = compare_rows(p, q, torch.tensor([0]))
    assert found[3:, 0].tolist() == [1.0, 1.0]


def test_what_does_not_fit_together_is_refused():
    p = torch.zeros(2, 4)
    for q, targets in ((p[:, :3], [0, 1]), (p, [0]), (p, [0, 4]), (p, [-1, 0])):
        with pytest.raises(ValueError, match="needed are \\[n, V\\] twice and n tokens"):
            compare_rows(p, q, torch.tensor(targets))
