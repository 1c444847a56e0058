"""Adapters of the original model follow what smoothing did to it, or are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from formats.adapters import read_lora
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.block_layers import expert_of
from formats.stored.folder import ADAPTER_FACTORS, MANIFEST
from inference.engine import Engine
from ptq.convert.convert import convert
from ptq.methods.awq import AWQSpec
from ptq.methods.common.block import BlockWork, set_parameter
from ptq.methods.common.folding import SmoothedGroup
from ptq.methods.rotation import RotationSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.shift import ShiftSpec
from ptq.methods.smooth_k import SmoothK, SmoothKSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.pipeline.artifact import Artifact
from ptq.pipeline.driver import solve
from ptq.pipeline.emit import adapter_factors
from tests.adapters import prefix_logits, write_adapter, write_prefix
from tests.fake_quantized import dequantized
from tests.ptq.methods.test_folding_families import MODELS, assert_same, outputs, plant
from tests.ptq.methods.test_smooth_k import plant as plant_keys
from tests.ptq.quantizing import (
    IDS,
    add_outliers,
    edit_model,
    fold_alpha,
    make_plan,
    observed_work,
    quantized,
)

SMOOTHED = (SmoothQuantSpec(alpha=0.8), SmoothKSpec(alpha=1.0), RTNSpec())


@pytest.fixture(scope="module")
def model(tiny_llama, tmp_path_factory) -> Path:
    def change(tensors: dict[str, Tensor]) -> None:
        add_outliers(tensors)
        plant_keys(tensors)

    return edit_model(tiny_llama, tmp_path_factory.mktemp("uneven") / "model", change)


@pytest.fixture(scope="module")
def smoothed(model, tmp_path_factory) -> Path:
    """The output of a run whose methods divide inputs and outputs."""
    output = tmp_path_factory.mktemp("smoothed")
    quantized(model, output, methods=SMOOTHED)
    return output


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("lora") / "adapter", model, scale=0.5)


def run(model: Path, output: Path, *methods, scheme: str = "a8w8c8") -> Path:
    return quantized(model, output, scheme, methods=methods).checkpoint


def add(work: BlockWork, low_rank: dict[str, tuple[Tensor, Tensor]], sign: int = 1) -> None:
    """Put adapters into a block's weights, or take them out."""
    for name, (a, b) in low_rank.items():
        linear = work.block.linears[name]
        set_parameter(linear, "weight", linear.weight + sign * b @ a)


@pytest.mark.parametrize("kind", MODELS)
def test_the_folded_model_with_the_moved_adapter_computes_the_same(make_model, tmp_path, kind):
    """In every family: groups of SmoothQuant and AWQ, then K smoothing, before anything rounds."""
    folder = make_model(kind, **MODELS[kind])
    work, generator = observed_work(make_plan(folder, tmp_path)), torch.Generator().manual_seed(1)
    work.dtype_of = lambda _: torch.float32  # what is planted is rounded no more
    plant(work)
    low_rank = {}
    for name, linear in work.block.linears.items():
        if expert_of(name) is None:
            n, k = linear.weight.shape
            a = torch.randn(4, k, generator=generator) / k**0.5
            low_rank[name] = a, torch.randn(n, 4, generator=generator) / 8
    plain = outputs(work)
    add(work, low_rank)
    before = outputs(work)
    assert (before[0] - plain[0]).norm() > 1e-2 * plain[0].norm()
    add(work, low_rank, sign=-1)
    for group in [SmoothedGroup(work, group) for group in work.groups]:
        group.commit(fold_alpha(group, 0.7))
    method = SmoothK(SmoothKSpec(alpha=1.0))
    method.prepare(work)
    method.solve(work)
    method.commit(work)
    found = adapter_factors(Checkpoint.open(folder), work)
    assert not any(expert_of(name) is not None for name in found)
    moved = {}
    for name, (a, b) in low_rank.items():
        d_in, d_out = (found.get(f"{name}.{r}_divisor", torch.ones(1)) for r in ("input", "output"))
        moved[name] = a * d_in, b / d_out.view(-1, 1)
    add(work, moved)
    assert_same(work, before)


def weight(checkpoint: Checkpoint, module: str) -> Tensor:
    if module not in checkpoint.quantized_modules:
        return checkpoint.tensor(f"{module}.weight").float()
    return dequantized(checkpoint, module)


def check_moved(source: Path, folder: Path, adapter: Path, steps: float = 0.6) -> None:
    """The merged weights of a checkpoint are those of the original, moved, but for rounding."""
    exact, found = Checkpoint.open(source), Checkpoint.open(folder)
    own, moved, factors = read_lora(adapter, exact), read_lora(adapter, found), factors_of(folder)
    assert factors
    for module, low_rank in own.modules.items():
        w, w_q = weight(exact, module), weight(found, module)
        d_in = factors.get(f"{module}.input_divisor", torch.ones(w.shape[1]))
        d_out = factors.get(f"{module}.output_divisor", torch.ones(len(w)))[:, None]
        wanted = (w + low_rank.b @ low_rank.a) * d_in / d_out
        step = (w * d_in / d_out).abs().amax(dim=1, keepdim=True) / 127
        error = moved.merged(module, w_q) - wanted
        assert (error.abs() / step).max() < steps
        exact_part = low_rank.b @ low_rank.a * d_in / d_out
        assert torch.allclose(
            moved.modules[module].b @ moved.modules[module].a, exact_part, rtol=1e-5, atol=1e-6
        )


def factors_of(folder: Path) -> dict[str, Tensor]:
    path = folder / ADAPTER_FACTORS
    return load_file(path) if path.is_file() else {}


def test_factors_lie_beside_the_weights(smoothed, model, adapter):
    folder = smoothed / "checkpoint"
    factors, checkpoint = factors_of(folder), Checkpoint.open(folder, verify=True)
    block = "model.layers.1"
    both = {f"{block}.self_attn.v_proj", f"{block}.mlp.up_proj"}
    for module in checkpoint.quantized_modules:
        if module.startswith(block):
            assert f"{module}.input_divisor" in factors
        turned = module.endswith(("q_proj", "k_proj"))
        assert (f"{module}.output_divisor" in factors) == (
            turned or module.endswith(("v_proj", "up_proj"))
        )
    for name, tensor in factors.items():
        assert tensor.dtype == torch.float32
        n, k = checkpoint.weight_shape(name.rpartition(".")[0])
        assert tensor.shape == (k if name.endswith("input_divisor") else n,)
    assert both <= {name.rpartition(".")[0] for name in factors}
    assert ADAPTER_FACTORS in json.loads((folder / MANIFEST).read_bytes())["files"]
    check_moved(model, folder, adapter)


def test_answers_are_those_of_the_merged_original(smoothed, model, adapter, tmp_path):
    """An adapter that did not follow would answer otherwise."""
    for name, source in {"exact": model, "ours": smoothed / "checkpoint"}.items():
        convert(source, tmp_path / name, "float", adapter=adapter)
    exact, found = (Engine.from_pretrained(tmp_path / n).score(IDS) for n in ("exact", "ours"))
    base = Engine.from_pretrained(model).score(IDS)
    error, effect = (found - exact).norm(), (base - exact).norm()
    assert error < 0.05 * effect
    own = Checkpoint.open(smoothed / "checkpoint")
    still, moved = (read_lora(adapter, c) for c in (Checkpoint.open(model), own))
    module = "model.layers.0.mlp.down_proj"
    assert not torch.allclose(still.modules[module].a, moved.modules[module].a, rtol=0.5)


def test_awq_tells_its_factors_too(model, adapter, tmp_path):
    folder = run(model, tmp_path, AWQSpec(search_samples=2), RTNSpec(), scheme="w8")
    check_moved(model, folder, adapter)


def test_a_solve_writes_the_same(model, smoothed, tmp_path):
    plan = make_plan(model, tmp_path, methods=SMOOTHED)
    found = solve(plan, Artifact.load(smoothed), progress=False).checkpoint
    own = (smoothed / "checkpoint" / ADAPTER_FACTORS).read_bytes()
    assert (found / ADAPTER_FACTORS).read_bytes() == own


def test_without_smoothing_there_is_no_file(model, adapter, tmp_path):
    folder = run(model, tmp_path, RTNSpec())
    assert not (folder / ADAPTER_FACTORS).exists()
    own, base = (read_lora(adapter, Checkpoint.open(f)) for f in (folder, model))
    assert all(torch.equal(own.modules[n].a, base.modules[n].a) for n in base.modules)
    assert all(torch.equal(own.modules[n].b, base.modules[n].b) for n in base.modules)


def test_an_adapter_of_the_quantized_folder_itself_stays(smoothed, model, tmp_path):
    folder = smoothed / "checkpoint"
    adapter = write_adapter(tmp_path / "a", model, base_model_name_or_path=str(folder))
    own, base = (read_lora(adapter, Checkpoint.open(f)) for f in (folder, model))
    assert all(torch.equal(own.modules[n].a, base.modules[n].a) for n in base.modules)


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ((RotationSpec(residual=False), RTNSpec()), "the method rotation"),
        ((RotationSpec(values=False), RTNSpec()), "the method rotation"),
        ((ShiftSpec(), RTNSpec()), "the method shift"),
    ],
)
def test_what_factors_do_not_tell_is_refused(model, adapter, tmp_path, methods, words):
    folder = run(model, tmp_path / "run", *methods)
    convert(folder, tmp_path / "float", "float")
    for path in (folder, tmp_path / "float"):
        with pytest.raises(CheckpointError) as caught:
            read_lora(adapter, Checkpoint.open(path))
        assert words in str(caught.value)
        assert "ptq quantize MODEL --adapter" in str(caught.value)
    (folder / ADAPTER_FACTORS).unlink()  # as a folder of before
    (folder / MANIFEST).unlink()
    if methods[0] == RotationSpec(values=False):
        with pytest.raises(CheckpointError, match="turned its residual stream"):
            read_lora(adapter, Checkpoint.open(folder))


def test_factors_go_along_where_a_checkpoint_is_converted(smoothed, model, adapter, tmp_path):
    """And multiply with those of another run on what came out."""
    convert(smoothed / "checkpoint", tmp_path / "float", "float", dtype="float32")
    assert factors_of(tmp_path / "float").keys() == factors_of(smoothed / "checkpoint").keys()
    twice = run(tmp_path / "float", tmp_path / "twice", *SMOOTHED)
    assert factors_of(twice).keys() >= factors_of(tmp_path / "float").keys()
    check_moved(model, twice, adapter, steps=1.3)
    w4 = run(model, tmp_path / "w4", SmoothQuantSpec(alpha=0.8), RTNSpec(), scheme="w4")
    convert(w4, tmp_path / "gptq", "gptq")
    convert(tmp_path / "gptq", tmp_path / "back", "compressed_tensors")
    for folder in (tmp_path / "gptq", tmp_path / "back"):
        assert (folder / ADAPTER_FACTORS).read_bytes() == (w4 / ADAPTER_FACTORS).read_bytes()


def test_damaged_factors_are_named(smoothed, adapter, tmp_path):
    folder = tmp_path / "copy"
    convert(smoothed / "checkpoint", folder, "float")
    (folder / MANIFEST).unlink()
    name = "model.layers.0.mlp.down_proj.input_divisor"
    for change, words in ((torch.zeros(256), "finite and positive"), (torch.ones(5), "of shape")):
        factors = factors_of(smoothed / "checkpoint")
        save_file(factors | {name: change}, folder / ADAPTER_FACTORS)
        with pytest.raises(CheckpointError, match=words) as caught:
            read_lora(adapter, Checkpoint.open(folder))
        assert name in str(caught.value)


def test_a_prefix_is_divided_by_the_factors_of_k_and_v(model, smoothed, tmp_path):
    checkpoint = smoothed / "checkpoint"
    own = {
        "moved": write_prefix(tmp_path / "a", model, 20),
        "unmoved": write_prefix(tmp_path / "b", model, 20, base_model_name_or_path=str(checkpoint)),
    }
    wanted = prefix_logits(model, own["moved"], IDS.tolist()).log_softmax(1)
    engine = Engine.from_pretrained(checkpoint, adapters=own)
    logs = {name: engine.score(IDS, name).log_softmax(1) for name in own}
    loss = {n: (wanted.exp() * (wanted - x)).sum(1).mean().item() for n, x in logs.items()}
    assert loss["moved"] < loss["unmoved"] / 3, loss
