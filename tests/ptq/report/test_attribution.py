"""Where the loss comes from: each part is that of the checkpoint, in what is else the original."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint.read import Checkpoint
from formats.families.block_layers import role_of
from inference.accuracy import compare
from inference.config import EngineConfig
from inference.engine import Engine
from ptq.methods.rotation import RotationSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.shift import ShiftSpec
from ptq.methods.smooth_k import SmoothKSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.output import FOUND_FILE
from ptq.recipe.reading import load_recipe, resolved_yaml
from ptq.recipe.schema import AttributionSpec
from ptq.report import attribution
from ptq.report.attribution import (
    Attribution,
    UnroundedCheckpoint,
    attribute,
    is_the_original,
    references,
)
from ptq.report.measure import measure, spread
from ptq.report.report import sections
from tests.experts import MOE
from tests.fake_quantized import dequantized
from tests.older_families import write_older
from tests.ptq.quantizing import executed, make_plan, random_tokens
from tests.ptq.quantizing import quantized as run

SIZES = EngineConfig(max_batch_size=1, max_model_len=64)
SMOOTHED = (
    RotationSpec(residual=False),
    ShiftSpec(),
    SmoothQuantSpec(alpha=0.6),
    SmoothKSpec(alpha=0.7),
    RTNSpec(),
)


def sequences() -> list[torch.Tensor]:
    return random_tokens(sequences=3, length=32).sequences()


def attributed(original: Engine, quantized: Engine, moved: Engine | None = None) -> Attribution:
    own = sequences()
    exact = references(original, own)
    return attribute(moved or original, quantized, own, exact, progress=False)


def of_parts(found: Attribution) -> dict[str, float]:
    return {part.name: part.kl for part in (*found.kinds, *found.blocks)}


def with_rounded(source: Path, quantized: Path, folder: Path, *roles: str, block: str = "") -> Path:
    """The original with the weights of some of its layers as they are after rounding."""
    shutil.copytree(source, folder)
    tensors, checkpoint = load_file(source / "model.safetensors"), Checkpoint.open(quantized)
    for module in checkpoint.quantized_modules:
        if role_of(module) in roles or (block and module.startswith(block)):
            tensors[f"{module}.weight"] = dequantized(checkpoint, module)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_part_is_what_the_original_loses_by_it_alone(tiny_llama, make_quantized, tmp_path):
    original = Engine.from_pretrained(tiny_llama, config=SIZES)
    rounded = make_quantized(tiny_llama, "w4")
    quantized = Engine.from_pretrained(rounded, config=SIZES)
    found = attributed(original, quantized)
    parts = of_parts(found)
    assert list(parts) == ["q/k/v", "o", "gate/up", "down", "block 0", "block 1"]
    assert found.unrounded == 0.0
    whole = compare(original, quantized, sequences())
    assert found.tokens == whole.tokens
    assert found.whole == pytest.approx(whole.kl_mean, rel=1e-4)
    for name, chosen in (
        ("q/k/v", {"roles": ("q", "k", "v")}),
        ("down", {"roles": ("down",)}),
        ("block 1", {"roles": (), "block": "model.layers.1."}),
    ):
        roles = chosen.pop("roles")
        alone = with_rounded(
            tiny_llama, rounded, tmp_path / name.replace("/", "-"), *roles, **chosen
        )
        lost = compare(original, Engine.from_pretrained(alone, config=SIZES), sequences())
        assert parts[name] == pytest.approx(lost.kl_mean, rel=1e-3), name


def test_the_cache_is_a_part_of_its_own(tiny_llama, make_quantized):
    original = Engine.from_pretrained(tiny_llama, config=SIZES)
    quantized = Engine.from_pretrained(make_quantized(tiny_llama, "c8"), config=SIZES)
    found = attributed(original, quantized)
    assert [part.name for part in found.kinds] == ["cache"]
    assert found.kinds[0].kl == found.whole > 0
    assert 0 < found.blocks[0].kl < 2 * found.whole
    assert found.float_cache == 0.0


def test_what_a_runtime_without_the_cache_would_lose_is_told(tiny_llama, make_quantized):
    original = Engine.from_pretrained(tiny_llama, config=SIZES)
    folder = make_quantized(tiny_llama, "a8w8c8")
    quantized = Engine.from_pretrained(folder, config=SIZES)
    floats = Engine.from_pretrained(folder, config=SIZES, quantized_kv=False)
    found = attributed(original, quantized)
    lost = compare(original, floats, sequences())
    assert found.float_cache == pytest.approx(lost.kl_mean, rel=1e-3)
    assert found.float_cache != found.whole


@pytest.mark.parametrize(
    ("family", "scheme", "methods"),
    [
        ("llama", "a8w8c8", SMOOTHED),
        ("qwen3", "a8w8c8", SMOOTHED),  # norms of q and k, which take K's factors
        ("llama", "w4", (RotationSpec(), RTNSpec())),  # the residual stream turns: untied
        ("qwen2_moe", "a8w8", (SmoothQuantSpec(alpha=0.5), RTNSpec())),
    ],
)
def test_what_methods_moved_between_layers_is_moved_and_not_rounded(
    make_model, tmp_path, family, scheme, methods
):
    model = make_model(family, **MOE.get(family, {}))
    plan = make_plan(model, tmp_path / "out", scheme, methods=methods)
    assert not is_the_original(plan)
    result = executed(plan)
    original = Engine.from_pretrained(model, config=SIZES)
    quantized = Engine.from_pretrained(result.checkpoint, config=SIZES)
    checkpoint = UnroundedCheckpoint.of_run(result.checkpoint, plan)
    unrounded = Engine(checkpoint, original.tokenizer, SIZES, original.backend, quantized_kv=False)
    found = attributed(original, quantized, unrounded)
    whole = compare(original, quantized, sequences()).kl_mean
    assert found.whole == pytest.approx(whole, rel=1e-3)
    assert found.unrounded < 0.02 * found.whole
    assert all(kl > found.unrounded for kl in of_parts(found).values())
    assert 0.3 * whole < sum(part.kl for part in found.kinds) < 3 * whole
    assert 0.3 * whole < sum(part.kl for part in found.blocks) < 3 * whole


def test_blocks_of_transformers_code_are_exchanged_as_a_whole(tmp_path):
    """Whatever their layers are called: OPT has a q_proj, and no Llama's blocks."""
    folder = write_older(tmp_path / "opt", "opt")
    written = run(folder, tmp_path / "out", methods=(RTNSpec(),)).checkpoint
    original, quantized = (Engine.from_pretrained(p, config=SIZES) for p in (folder, written))
    found = attributed(original, quantized)
    assert [part.name for part in found.kinds] == ["cache"]
    assert [part.name for part in found.blocks] == ["block 0", "block 1"]
    assert 0 < max(of_parts(found).values()) < 2 * found.whole


def test_many_blocks_are_taken_in_groups():
    assert [list(group) for group in attribution._groups(3)] == [[0], [1], [2]]
    for blocks in (12, 13, 32, 80):
        groups = attribution._groups(blocks)
        assert [i for group in groups for i in group] == list(range(blocks))
        assert len(groups) <= attribution.MOST_GROUPS
    assert attribution._group_name(range(3, 6)) == "blocks 3 to 5"


def test_sequences_come_from_the_whole_of_the_text():
    rows = list(torch.arange(10)[:, None])
    assert [int(row) for row in spread(rows, 4)] == [0, 2, 5, 7]
    assert len(spread(rows, 20)) == 10
    assert spread(rows, 0) == []


def test_what_cannot_be_told_is_said(tiny_llama, tmp_path, monkeypatch):
    plan = make_plan(tiny_llama, tmp_path / "out", "a8w8", methods=SMOOTHED[2::2])
    result = executed(plan)
    told = measure(result, plan, random_tokens(), progress=False)
    assert isinstance(told.attribution, Attribution)
    monkeypatch.setattr("ptq.report.measure.MOVED", -1.0)
    untold = measure(result, plan, random_tokens(), progress=False)
    (result.checkpoint.parent / FOUND_FILE).unlink()
    lost = measure(result, plan, random_tokens(), progress=False)
    for data, reason in ((untold, "no part of it can be measured"), (lost, FOUND_FILE)):
        assert isinstance(data.attribution, str)
        assert reason in data.attribution
        (section,) = [s for s in sections(data) if s.title == "Where the loss comes from"]
        assert section.text.startswith(f"This was not measured: {data.attribution}")
        assert not section.plots


def test_a_recipe_may_leave_it_out(tiny_llama, tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(
        f"model: {{path: {tiny_llama}}}\nscheme: w4\nmethods: [rtn]\noutput: {{path: out}}\n"
        "report: {attribution: false, completions: 0}\n"
    )
    recipe = load_recipe(file)
    assert recipe.report.attribution is None
    file.write_text(resolved_yaml(recipe))
    assert load_recipe(file) == recipe
    on = load_recipe(file, ["report.attribution=true"]).report.attribution
    assert on == AttributionSpec()
