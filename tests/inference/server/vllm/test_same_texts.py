"""A checkpoint on our server and on vLLM's; `VLLM_PYTHON` names the interpreter that has vLLM."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ptq.commands import run
from tests.inference.server.vllm.same_texts import compare

PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if find_spec("vllm") else None)
FEW = ("dataset.calibration.samples=16", "dataset.evaluation.samples=2", "report.speed=false")
NEAR = 0.5  # nats between two tokens that rounding may exchange


@pytest.mark.skipif(PYTHON is None, reason="vLLM is not installed, and VLLM_PYTHON names no other")
def test_texts_part_only_where_two_tokens_are_nearly_as_likely(tmp_path: Path):
    words = [word for setting in FEW for word in ("--set", setting)]
    assert run.main(["a8w8", *words, "--output", str(tmp_path / "out"), "--quiet"]) in (0, 1)
    pairs = compare(tmp_path / "out/checkpoint", PYTHON or "")
    assert sum(pair.equal for pair in pairs) >= len(pairs) // 2
    for pair in pairs:
        assert pair.gap < NEAR, pair.prompt
