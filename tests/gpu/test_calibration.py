"""Blocks solved on a GPU: as on the CPU, up to the rounding of sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from kernels.numerics import TYPES, choose_affine, choose_scale, fake_quantize
from ptq.methods.gptq import GPTQSpec
from ptq.methods.refine import RefineSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.pipeline.driver import quantize_tokens
from tests.ptq.quantizing import make_plan, random_tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMOOTH = SmoothQuantSpec(alphas=(0.5, 0.9), search_samples=3)
RUNS = [
    ("a8w8c8", (SMOOTH, RTNSpec())),
    ("w4", (GPTQSpec(),)),
    ("w4", (RTNSpec(scale="output_mse"),)),
    ("a8w4c8", (GPTQSpec(), RefineSpec(iterations=5, batch=2))),
    ("fp8_block", (RTNSpec(),)),
    ("fp8_c8", (GPTQSpec(scale="absmax"),)),
]


def solved(model: Path, output: Path, scheme: str, methods: tuple, device: str) -> Checkpoint:
    plan = make_plan(model, output, scheme, methods=methods)
    recipe = plan.recipe.model_copy(update={"device": device})
    plan = plan.model_copy(update={"recipe": recipe})
    return Checkpoint.open(quantize_tokens(plan, random_tokens(), progress=False).checkpoint)


def test_one_scale_divides_alike_wherever_it_is():
    """Numbers amid two steps, which another last bit of a quotient rounds the other way."""
    scale = torch.tensor(0.0037)
    x = (torch.arange(-127, 127) + 0.5) * torch.linspace(0.5, 1.0, 4096)[:, None] * scale
    wanted = fake_quantize(x, scale)
    for own in (scale, scale.cuda()):
        assert torch.equal(fake_quantize(x.cuda(), own).cpu(), wanted)


@pytest.mark.parametrize(("scheme", "methods"), RUNS, ids=lambda x: str(x)[:40])
def test_a_gpu_solves_as_the_cpu(tiny_llama, tmp_path, scheme, methods):
    cpu, gpu = (
        solved(tiny_llama, tmp_path / device, scheme, methods, device) for device in ("cpu", "cuda")
    )
    for module in cpu.quantized_modules:
        a, b = cpu.weight(module), gpu.weight(module)
        assert torch.allclose(a.scale, b.scale, rtol=0.05)
        same = (a.q.float() == b.q.float()).float().mean().item()
        assert same > (0.98 if len(methods) == 1 and isinstance(methods[0], RTNSpec) else 0.75)
    for attention, pair in cpu.kv_scales.items():
        for ours, theirs in zip(pair, gpu.kv_scales[attention], strict=True):
            assert torch.allclose(ours, theirs, rtol=0.05)


def test_two_runs_on_a_gpu_have_the_same_bytes(tiny_llama, tmp_path):
    methods = (GPTQSpec(), RefineSpec(iterations=5, batch=2))
    first, second = (
        solved(tiny_llama, tmp_path / name, "w4", methods, "cuda").path / "model.safetensors"
        for name in "ab"
    )
    assert first.read_bytes() == second.read_bytes()


def test_scales_of_a_gpu_are_those_of_the_cpu():
    generator = torch.Generator().manual_seed(0)
    low, high = -torch.rand(9999, generator=generator), torch.rand(9999, generator=generator)
    for dtype in TYPES.values():
        assert torch.equal(choose_scale(high.cuda(), dtype).cpu(), choose_scale(high, dtype))
        if dtype.q_max > 0 and dtype.storage == torch.int8:
            pairs = zip(
                choose_affine(low.cuda(), high.cuda(), dtype),
                choose_affine(low, high, dtype),
                strict=True,
            )
            assert all(torch.equal(gpu.cpu(), cpu) for gpu, cpu in pairs)
