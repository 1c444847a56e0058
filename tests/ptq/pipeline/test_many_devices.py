"""A run on several devices: the bytes of one, resumed on another number, failures named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ptq.methods.awq import AWQSpec
from ptq.methods.clip import ClipSpec
from ptq.methods.gptq import GPTQSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.methods.two_sided import TwoSidedSpec
from ptq.output import CHECKPOINT_FOLDER
from ptq.pipeline.driver import quantize_tokens
from ptq.recipe.schema import DevicesSpec
from ptq.result import QuantizationResult
from tests.ptq.quantizing import make_plan, random_tokens

SMOOTH = SmoothQuantSpec(alphas=(0.5, 0.9), search_samples=3)
RUNS_OF = {
    "w4_gptq": ("w4", (GPTQSpec(),)),
    "a8w8c8": ("a8w8c8", (SMOOTH, ClipSpec(factors=(0.9, 0.7), search_samples=2), RTNSpec())),
    "w4_awq": ("w4", (AWQSpec(steps=2, search_samples=2), RTNSpec(scale="output_mse"))),
    "fp8_block": ("fp8_block", (RTNSpec(),)),
    "two_sided": ("w4", (TwoSidedSpec(),)),
}
CPU = torch.device("cpu")


def run(model: Path, output: Path, name: str, workers: int) -> QuantizationResult:
    scheme, methods = RUNS_OF[name]
    plan = make_plan(model, output, scheme, methods=methods)
    recipe = plan.recipe.model_copy(update={"device": DevicesSpec(cpus=workers)})
    plan = plan.model_copy(update={"recipe": recipe})
    return quantize_tokens(plan, random_tokens(sequences=18, length=24), progress=False)


def left_by(result: QuantizationResult) -> tuple[dict[str, bytes], dict]:
    """Files of a run but its recipe, and its record but for times and memory."""
    output = result.checkpoint.parent
    files = [
        *result.checkpoint.rglob("*"),
        *output.glob("*.safetensors"),
        *output.glob("*/*.safe*"),
    ]
    told = result.model_dump(exclude={"checkpoint", "seconds", "peak_rss_bytes", "resumed_blocks"})
    told["blocks"] = [row["block"] for row in told["blocks"]]
    return {str(f.relative_to(output)): f.read_bytes() for f in files if f.is_file()}, told


@pytest.mark.parametrize("name", RUNS_OF)
def test_the_number_of_devices_decides_nothing(tiny_llama, tmp_path, name):
    files, told = left_by(run(tiny_llama, tmp_path / "1", name, 1))
    assert f"{CHECKPOINT_FOLDER}/model.safetensors" in files
    for workers in (2, 3):
        found, also = left_by(run(tiny_llama, tmp_path / str(workers), name, workers))
        assert found.keys() == files.keys()
        assert [name for name in files if found[name] != files[name]] == []
        assert also == told
