"""Families on the fast path: our numbers are transformers', before and after quantization."""

import pytest

from formats.checkpoint.read import Checkpoint
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
MODELS = TINY | {"olmo2": {}}


@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_blocks_are_those_of_transformers(make_model, kind):
    folder = make_model(kind, **MODELS[kind])
    check_engine(folder, random_tokens(1, 60).ids[0].clamp(min=1))
    check_blocks(folder)


@pytest.mark.parametrize(
    ("kind", "preset"), [*in_turn(TINY, PRESETS), *(("olmo2", preset) for preset in PRESETS)]
)
def test_quantized_checkpoints_run_here_and_in_transformers(make_model, tmp_path, kind, preset):
    check_quantized(make_model(kind, **MODELS[kind]), tmp_path, preset)


ROUNDED = {"llama": {}, "qwen2": {}} | MOE


@pytest.mark.parametrize(("family", "preset"), in_turn(ROUNDED, ["a8w8c8", "w4"]))
def test_the_kl_is_that_of_the_same_numbers_in_transformers(make_model, tmp_path, family, preset):
    folder = make_model(family, **ROUNDED[family])
    plan = make_plan(folder, tmp_path, preset, methods=METHODS[preset][0])
    path = quantize_tokens(plan, random_tokens(), progress=False).checkpoint
    ids = random_tokens().sequences()[1]
    check_rounding(Checkpoint.open(path), ids, transformers_logits(folder, ids), 0.3)
