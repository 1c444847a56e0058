"""Families on the fast path: our numbers are transformers', before and after quantization."""

from __future__ import annotations

import pytest

from tests.families import check_blocks, check_engine, check_quantized
from tests.ptq.quantizing import random_tokens
from tests.tiny_families import TINY


@pytest.mark.parametrize("kind", TINY)
def test_logits_and_blocks_are_those_of_transformers(make_model, kind):
    folder = make_model(kind, **TINY[kind])
    check_engine(folder, random_tokens(1, 60).ids[0].clamp(min=1))
    check_blocks(folder)


@pytest.mark.parametrize("preset", ["a8w8c8", "w4", "fp8_channel"])
@pytest.mark.parametrize("kind", TINY)
def test_quantized_checkpoints_run_here_and_in_transformers(make_model, tmp_path, kind, preset):
    check_quantized(make_model(kind, **TINY[kind]), tmp_path, preset)
