"""Other tools' folders on a GPU: those that were never converted give the CPU's logits."""

from __future__ import annotations

import pytest
import torch

from formats.scheme import PRESETS, Scheme, WeightSpec
from inference.engine import Engine
from ptq.convert.convert import convert
from tests.conftest import write_quantized
from tests.families import distance
from tests.ptq.convert.foreign_folders import turn_inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
IDS = list(range(3, 40))
W4 = WeightSpec(dtype="int4", granularity="group", group_size=32, symmetric=False)


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq", "act_order"])
def test_logits_are_those_of_the_cpu(layout, tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "w4_asym", Scheme(weights=W4))
    source = write_quantized(tiny_llama, tmp_path / "source", "w4_asym")
    folder = tmp_path / "folder"
    convert(source, folder, "gptq" if layout == "act_order" else layout)
    if layout == "act_order":
        folder = turn_inputs(folder, tmp_path / "turned")
    cpu = Engine.from_pretrained(folder).score(IDS)
    gpu = Engine.from_pretrained(folder, device="cuda").score(IDS).cpu()
    assert distance(gpu.cpu(), cpu) < 0.03
