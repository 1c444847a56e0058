"""Families on the fast path: our numbers are transformers', before and after quantization."""

import pytest

from formats.checkpoint.read import Checkpoint
from formats.families.family import Attention
from formats.families.registry import BY_TYPE
from ptq.pipeline.driver import quantize_tokens
from tests.experts import MOE
from tests.families import (
    METHODS,
    check_blocks,
    check_engine,
    check_quantized,
    check_rounding,
    in_turn,
    transformers_logits,
)
from tests.ptq.quantizing import make_plan, random_tokens
from tests.tiny_families import TINY

PRESETS = ["a8w8c8", "w4", "fp8_channel"]
MODELS = {  # every declared type that transformers has a class for; others have tests of their own
    kind: TINY.get(kind, {})
    for kind, family in BY_TYPE.items()
    if isinstance(family.attention, Attention) and family.mixture is None and not family.alike
}


@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_blocks_are_those_of_transformers(make_model, kind):
    folder = make_model(kind, **MODELS[kind])
    check_engine(folder, random_tokens(1, 60).ids[0].clamp(min=1))
    check_blocks(folder)


@pytest.mark.parametrize(("kind", "preset"), in_turn(MODELS, PRESETS))
def test_quantized_checkpoints_run_here_and_in_transformers(make_model, tmp_path, kind, preset):
    check_quantized(make_model(kind, **MODELS[kind]), tmp_path, preset)


@pytest.mark.parametrize(("family", "preset"), in_turn(MOE, ["a8w8c8", "w4"]))
def test_the_kl_is_that_of_the_same_numbers_in_transformers(make_model, tmp_path, family, preset):
    folder = make_model(family, **MOE[family])
    plan = make_plan(folder, tmp_path, preset, methods=METHODS[preset][0])
    path = quantize_tokens(plan, random_tokens(), progress=False).checkpoint
    ids = random_tokens().sequences()[1]
    check_rounding(Checkpoint.open(path), ids, transformers_logits(folder, ids), 0.3)
