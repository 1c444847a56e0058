"""The basis of a residual stream, as config.json tells it."""

import pytest
import torch

from formats.errors import CheckpointError
from formats.residual_rotation import (
    change_of_basis,
    random_rotation,
    rotation_seeds,
    with_rotation,
)

PLAIN = {"hidden_size": 24}
ONCE = with_rotation(PLAIN, 7)
TWICE = with_rotation(ONCE, 2)


def test_rotations_are_told_in_their_order():
    assert [rotation_seeds(config) for config in (PLAIN, ONCE, TWICE)] == [(), (7,), (7, 2)]
    assert TWICE["hidden_size"] == 24


def test_what_was_turned_is_turned_on_and_back():
    x = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    streams = [x, x @ random_rotation(24, 7), x @ random_rotation(24, 7) @ random_rotation(24, 2)]
    configs = [PLAIN, ONCE, TWICE]
    for one, source in zip(streams, configs, strict=True):
        for other, target in zip(streams, configs, strict=True):
            turn = change_of_basis(source, target, 24)
            assert (turn is None) == (source is target)
            assert torch.allclose(one if turn is None else one @ turn, other, atol=1e-12)


@pytest.mark.parametrize("found", [3, [-1], [True], ["0"], None])
def test_anything_else_is_refused(found):
    with pytest.raises(CheckpointError, match="residual_rotation is .*integers from 0"):
        rotation_seeds({"residual_rotation": found})
