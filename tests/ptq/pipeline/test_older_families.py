"""Families older than Llama are quantized, run, and open in transformers with the same logits."""

from __future__ import annotations

import pytest

from tests.families import METHODS, check_quantized
from tests.older_families import OLDER, write_older

QUICK = {
    ("bloom", "a8w8c8"),
    ("bloom", "w4"),
    ("falcon", "a8w8c8"),
    ("gpt_neox", "w4"),
    ("gpt2", "a8w8c8"),
    ("gptj", "a8w8c8"),
    ("opt", "fp8_channel"),
    ("opt", "w4"),
    ("starcoder2", "a8w8c8"),
}
PAIRS = [(name, preset) for name in OLDER for preset in METHODS]
UNREAD = [("falcon", "w4"), ("falcon_multi_query", "w4")]  # its own kind of linear layer
UNREAD += [("gpt2", preset) for preset in METHODS]  # to transformers, none are linear layers
TWICE = "falcon_alibi"  # transformers' eager attention, which tests round by hand, biases twice


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.ci)
        for pair in PAIRS
        if pair[0] != TWICE
    ],
)
def test_logits_are_near_those_of_the_float_model(tmp_path, name, preset):
    folder = write_older(tmp_path / "model", name)
    checkpoint = check_quantized(
        folder, tmp_path / "out", preset, opens=(name, preset) not in UNREAD
    )
    linears = [module for module in checkpoint.quantized_modules if ".0." in module]
    assert len(linears) >= 4
