"""Our engine rounds what a checkpoint says, no more: its KL is that of the numbers in the files."""

from __future__ import annotations

import pytest

from formats.checkpoint.read import Checkpoint
from ptq.pipeline.driver import quantize_tokens
from tests.experts import MOE
from tests.families import METHODS, check_rounding, transformers_logits
from tests.ptq.quantizing import make_plan, random_tokens

MODELS = {"llama": {}, "qwen2": {}} | MOE


@pytest.mark.parametrize("preset", ["a8w8c8", "w4"])
@pytest.mark.parametrize("family", MODELS)
def test_the_kl_is_that_of_the_same_numbers_in_transformers(make_model, tmp_path, family, preset):
    folder = make_model(family, **MODELS[family])
    plan = make_plan(folder, tmp_path, preset, methods=METHODS[preset][0])
    path = quantize_tokens(plan, random_tokens(), progress=False).checkpoint
    ids = random_tokens().sequences()[1]
    check_rounding(Checkpoint.open(path), ids, transformers_logits(folder, ids), 0.3)
