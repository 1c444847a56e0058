"""A run on several devices: the bytes of one, resumed on another number, failures named."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
import torch

from calibrate.data import TokenSet
from calibrate.spec import SplitSpec
from calibrate.transfers import RUNS
from formats.errors import RecipeError
from ptq.methods.awq import AWQSpec
from ptq.methods.clip import ClipSpec
from ptq.methods.gptq import GPTQ, GPTQSpec
from ptq.methods.refine import RefineSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.smooth_k import SmoothKSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.methods.two_sided import TwoSidedSpec
from ptq.output import CHECKPOINT_FOLDER, RESUME_FOLDER
from ptq.pipeline import resume
from ptq.pipeline.artifact import Artifact
from ptq.pipeline.driver import quantize_tokens, solve
from ptq.plan.plan import Plan, plan_recipe
from ptq.recipe.reading import read_recipe
from ptq.recipe.schema import DevicesSpec
from ptq.result import QuantizationResult
from tests.families import but_in_ci
from tests.ptq.quantizing import make_plan, random_tokens, stopped_run

SMOOTH = SmoothQuantSpec(alphas=(0.5, 0.9), search_samples=3)
RUNS_OF = {
    "w4_gptq": ("w4", (GPTQSpec(),)),
    "a8w8c8": ("a8w8c8", (SMOOTH, ClipSpec(factors=(0.9, 0.7), search_samples=2), RTNSpec())),
    "w4_awq": ("w4", (AWQSpec(steps=2, search_samples=2), RTNSpec(scale="output_mse"))),
    "fp8_block": ("fp8_block", (RTNSpec(),)),
    "two_sided": ("w4", (TwoSidedSpec(),)),
    "refined": ("a8w4c8", (SmoothKSpec(), GPTQSpec(), RefineSpec(iterations=2, batch=2))),
}


def plan_on(device: str | DevicesSpec, model: Path, output: Path, name: str) -> Plan:
    """A recipe by its name, for more samples than there are runs of them."""
    scheme, methods = RUNS_OF[name]
    plan = make_plan(model, output, scheme, methods=methods)
    split = SplitSpec(samples=RUNS + 4, sequence_length=16)
    data = plan.recipe.dataset.model_copy(update={"calibration": split})
    recipe = plan.recipe.model_copy(update={"device": device, "dataset": data})
    return plan.model_copy(update={"recipe": recipe})


def samples() -> TokenSet:
    return random_tokens(sequences=RUNS + 4, length=16)


def run(model: Path, output: Path, name: str, workers: int) -> QuantizationResult:
    plan = plan_on(DevicesSpec(cpus=workers), model, output, name)
    return quantize_tokens(plan, samples(), progress=False)


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


@pytest.mark.parametrize("name", but_in_ci(RUNS_OF, "a8w8c8"))
def test_the_number_of_devices_decides_nothing(tiny_llama, tmp_path, name):
    files, told = left_by(run(tiny_llama, tmp_path / "1", name, 1))
    assert f"{CHECKPOINT_FOLDER}/model.safetensors" in files
    for workers in (2, 3):
        found, also = left_by(run(tiny_llama, tmp_path / str(workers), name, workers))
        assert found.keys() == files.keys()
        assert [name for name in files if found[name] != files[name]] == []
        assert also == told


def test_experts_are_shared_out(make_model, tmp_path):
    """Those that read one input are solved by both, events and all."""
    model = make_model("mixtral")
    expected = left_by(run(model, tmp_path / "1", "w4_gptq", 1))
    assert left_by(run(model, tmp_path / "2", "w4_gptq", 2)) == expected


def test_what_a_run_has_seen_is_solved_again_by_many(tiny_llama, tmp_path, monkeypatch):
    run(tiny_llama, tmp_path / "seen", "a8w8c8", 2)
    artifact = Artifact.load(tmp_path / "seen")
    monkeypatch.setitem(RUNS_OF, "again", ("a8w4c8", (SMOOTH, RTNSpec(scale="mse"))))
    found = []
    for workers in (1, 3):
        device, output = DevicesSpec(cpus=workers), tmp_path / str(workers)
        plan = plan_on(device, tiny_llama, output, "again")
        found.append(left_by(solve(plan, artifact, progress=False)))
    assert found[0] == found[1]


def test_a_stopped_run_goes_on_with_another_number_of_devices(tiny_llama, tmp_path):
    expected, told = left_by(run(tiny_llama, tmp_path / "whole", "w4_gptq", 1))
    output = tmp_path / "out"
    with stopped_run(by=KeyboardInterrupt):
        run(tiny_llama, output, "w4_gptq", 3)
    found = run(tiny_llama, output, "w4_gptq", 2)
    assert found.resumed_blocks == 1
    assert left_by(found) == (expected, told)


def test_a_layer_that_fails_is_named_and_nothing_is_lost(tiny_llama, tmp_path, monkeypatch):
    plain, output = GPTQ.solve, tmp_path / "out"

    def fail(self, work):
        if "model.layers.1.mlp.down_proj" in work.targets:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        plain(self, work)

    monkeypatch.setattr(resume, "SHARE", 1e9)
    with monkeypatch.context() as patch:
        patch.setattr(GPTQ, "solve", fail)
        with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB") as caught:
            run(tiny_llama, output, "w4_gptq", 2)
    (note,) = caught.value.__notes__
    assert note.startswith("It happened on worker ")
    assert note.endswith(" of 2 on cpu, gptq of model.layers.1.mlp.down_proj.")
    assert (output / RESUME_FOLDER / "block-00000.safetensors").is_file()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("worker")]
    assert run(tiny_llama, output, "w4_gptq", 2).resumed_blocks == 1


def test_a_sample_that_fails_ends_those_that_wait_for_it(tiny_llama, tmp_path, monkeypatch):
    """Its run of samples never ends, so that the next one's turn never comes."""

    def fail(self, name, x, tokens=None):
        if threading.current_thread().name.startswith("worker 1"):
            raise RecipeError("no")

    monkeypatch.setattr("ptq.methods.common.moments.Moments.add", fail)
    with pytest.raises(RecipeError, match="no") as caught:
        run(tiny_llama, tmp_path / "out", "w4_gptq", 3)
    told = "It happened on worker 1 of 3 on cpu, running samples through model.layers.0."
    assert caught.value.__notes__ == [told]


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ({"gpus": 1, "cpus": 1}, "both gpus and cpus"),
        ({}, "neither gpus nor cpus"),
        ({"gpus": 0}, "found 0"),
        ("gpu", "found the text 'gpu'"),
        pytest.param(
            {"gpus": 2},
            "found gpus, but torch",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs"),
        ),
    ],
)
def test_devices_that_cannot_be_are_refused(tiny_llama, tmp_path, device, told):
    text = json.dumps(device)
    settings = [f"model.path={tiny_llama}", f"output.path={tmp_path / 'out'}", f"device={text}"]
    with pytest.raises(RecipeError, match=told):
        plan_recipe(read_recipe("w4_gptq", settings))


@pytest.mark.parametrize(
    ("names", "wanted", "told"),
    [
        (["H200", "H200"], 3, "device.gpus: found 3, but torch sees 2 here; give at most 2"),
        (["H200", "A10"], 2, "device.gpus: found 2, which are H200 and A10; "),
    ],
)
def test_gpus_must_be_there_and_of_one_kind(tiny_llama, tmp_path, monkeypatch, names, wanted, told):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(names))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: names[index])
    settings = [f"model.path={tiny_llama}", f"output.path={tmp_path}/out", "dataset.name=stdlib"]
    with pytest.raises(RecipeError, match=re.escape(told)):
        plan_recipe(read_recipe("w4_gptq", [*settings, f"device={{gpus: {wanted}}}"]))
