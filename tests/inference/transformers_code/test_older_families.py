"""Families older than Llama run over our cache, as transformers computes them."""

from __future__ import annotations

import pytest

from tests.families import check_engine
from tests.older_families import OLDER, write_older
from tests.ptq.quantizing import random_tokens


@pytest.mark.parametrize("name", OLDER)
def test_logits_and_tokens_are_those_of_transformers(tmp_path, name):
    """A prompt in chunks, then a token a step; the window of GPT-Neo is passed."""
    check_engine(write_older(tmp_path, name), random_tokens(1, 60).ids[0].clamp(min=1))
