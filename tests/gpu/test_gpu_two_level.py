"""Scales of two levels on a GPU: the bits of the CPU, and chosen by methods that run there."""

from __future__ import annotations

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.scheme import Scheme, WeightSpec
from kernels.two_level import choose_unit, larger_unit, nearest_multiples, stored_unit, two_level
from ptq.methods.gptq import GPTQSpec
from ptq.methods.refine import RefineSpec
from ptq.pipeline.driver import quantize_tokens
from tests.ptq.quantizing import make_plan, random_tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_units_and_multiples_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    power = torch.randint(-30, 10, (9000, 1), generator=generator)
    wanted = (torch.rand(9000, 32, generator=generator) + 0.05) * 2.0**power
    for function in (choose_unit, lambda scale: larger_unit(choose_unit(scale))):
        unit = function(wanted)
        assert torch.equal(function(wanted.cuda()).cpu(), unit)
        scale = nearest_multiples(wanted, unit) * unit
        there = nearest_multiples(wanted.cuda(), unit.cuda()) * unit.cuda()
        assert torch.equal(there.cpu(), scale)
        assert torch.equal(stored_unit(there).cpu(), stored_unit(scale))
        for dtype in (torch.float32, torch.bfloat16):
            ours, theirs = two_level(scale.to(dtype)), two_level(there.to(dtype))
            assert ours is not None
            assert theirs is not None
            assert all(torch.equal(a, b.cpu()) for a, b in zip(ours, theirs, strict=True))
    assert two_level(wanted.cuda()) is None


def test_methods_on_a_gpu_keep_two_levels(tiny_llama, tmp_path) -> None:
    weights = WeightSpec(dtype="int4", granularity="group", group_size=32, two_level=True)
    methods = (GPTQSpec(), RefineSpec(iterations=5, batch=2))
    plan = make_plan(tiny_llama, tmp_path, Scheme(weights=weights), methods=methods)
    recipe = plan.recipe.model_copy(update={"device": "cuda"})
    plan = plan.model_copy(update={"recipe": recipe})
    out = Checkpoint.open(quantize_tokens(plan, random_tokens(), progress=False).checkpoint)
    for name in out.quantized_modules:
        assert two_level(out.weight(name).scale) is not None
