"""A few of the models that `tests.sweep_families` tries; all of them take five minutes."""

import pytest

from tests.families import but_in_ci
from tests.sweep_families import STEPS, try_type, why_left_out

SAMPLE = ("apertus", "gpt_bigcode", "helium", "nemotron", "dots1", "seed_oss", "hunyuan_v1_moe")
SAMPLE += ("lfm2",)  # keeps a state
SAMPLE += ("gemma3n_text", "granitemoe")  # K and V of other blocks; experts in 3-D parameters
SAMPLE += ("kimi_linear",)  # convolutions that files have one by one
SAMPLE += ("dbrx", "jetmoe", "llama4_text")  # code that looks at data; attention in chunks
SAMPLE += ("minimax", "zaya", "zamba2")  # states without convolutions, of q, k, v; shared blocks
HERE = ("apertus", "lfm2", "gemma3n_text", "granitemoe")  # the others in CI alone


@pytest.mark.parametrize("kind", but_in_ci(SAMPLE, *HERE))
def test_a_model_without_a_declaration_passes_every_step(kind):
    found = try_type(kind, shown=True)
    assert found.passed == STEPS, found.failed or found.left_out


def test_what_is_no_decoder_of_text_does_not_count():
    reason = why_left_out("gemma3")
    assert reason is not None
    assert "several models" in reason
    assert try_type("gemma3").left_out == reason


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("diffllama", "self_attn attends twice with the same keys and other values"),
        ("hrm_text", "its blocks run several times on each token"),
        ("longcat_flash", "not every expert is a gate, an up and a down projection"),
        ("doge", "attention a mask that is neither causal nor a sliding window"),
    ],
)
def test_what_is_not_run_is_refused_with_a_reason(kind, why):
    found = try_type(kind)
    assert found.failed is not None
    assert why in found.failed
