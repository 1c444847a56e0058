"""Which channels of a head share a factor that commutes with rotary embedding."""

from __future__ import annotations

import pytest

from formats.families.attention import Attention
from formats.families.family import Family
from formats.families.pairs import turning_pairs

CONFIG = {"num_attention_heads": 2, "hidden_size": 12, "layers": [1, 0]}


@pytest.mark.parametrize(
    ("kind", "part", "found"),
    [
        ("halves", 1.0, (0, 1, 2, 0, 1, 2)),
        ("halves", 2 / 3, (0, 1, 0, 1, 2, 3)),
        ("interleaved", 1.0, (0, 0, 1, 1, 2, 2)),
        ("interleaved", 2 / 3, (0, 0, 1, 1, 2, 3)),
    ],
)
def test_pairs_are_those_that_turn(kind, part, found):
    attention = Attention(rotary_pairs=kind, unrotated_setting="layers")
    family = Family(model_types=("x",), attention=attention, partial_rotary=True)
    config = CONFIG | {"partial_rotary_factor": part}
    assert turning_pairs(family, config, 0) == found
    assert turning_pairs(family, config, 1) == (0, 1, 2, 3, 4, 5)
    assert turning_pairs(family, {**config, "layers": None}, 1) == found
