"""A few of the models that `tests.sweep_families` tries; all of them take five minutes."""

from __future__ import annotations

import pytest

from tests.sweep_families import STEPS, try_type, why_left_out

SAMPLE = ("apertus", "gpt_bigcode", "helium", "nemotron", "dots1", "seed_oss", "hunyuan_v1_moe")
SAMPLE += ("lfm2",)  # keeps a state


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_model_without_a_declaration_passes_every_step(kind):
    found = try_type(kind, shown=True)
    assert found.passed == STEPS, found.failed or found.left_out


def test_what_is_no_decoder_of_text_does_not_count():
    reason = why_left_out("gemma3")
    assert reason is not None
    assert "several models" in reason
    assert try_type("gemma3").left_out == reason


def test_what_its_code_does_not_compute_is_refused_by_name():
    found = try_type("gemma3n_text")
    assert found.failed is not None
    assert found.failed.startswith("CheckpointError: Gemma3nTextModel")
    assert "per_layer_projection_scale" in found.failed
