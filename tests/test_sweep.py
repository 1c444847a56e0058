"""A few of the models that `tests.sweep_families` tries; all of them take five minutes."""

from __future__ import annotations

import pytest

from tests.sweep_families import STEPS, try_type, why_left_out

SAMPLE = ("apertus", "gpt_bigcode", "helium", "nemotron", "dots1", "seed_oss", "hunyuan_v1_moe")


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_model_without_a_declaration_passes_every_step(kind):
    found = try_type(kind, shown=True)
    assert found.passed == STEPS, found.failed or found.left_out


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("mamba", "another state"), ("gemma3", "several models"), ("qwen3_next", "another state")],
)
def test_what_is_no_decoder_with_a_cache_does_not_count(kind, reason):
    assert reason in why_left_out(kind)
    assert reason in try_type(kind).left_out


def test_what_its_code_does_not_compute_is_refused_by_name():
    found = try_type("gemma3n_text")
    assert found.failed is not None
    assert found.failed.startswith("CheckpointError: Gemma3nTextModel")
    assert "per_layer_projection_scale" in found.failed
