"""The driver: what it writes is what it solved, the same bytes every time, in bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import ptq
from calibrate.data import TokenSet
from calibrate.spec import ObserverSpec
from calibrate.statistics import Statistics
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RecipeError
from formats.memory import peak_rss_bytes
from formats.scheme import KVCacheSpec, Scheme
from ptq.methods.clip import Clip, ClipSpec
from ptq.methods.common.block import BlockWork
from ptq.methods.common.method import Method
from ptq.methods.rtn import RTNSpec
from ptq.pipeline.driver import quantize, quantize_tokens
from ptq.pipeline.passes import observe
from ptq.recipe.reading import load_recipe
from ptq.recipe.schema import ObserversSpec
from ptq.result import load_result
from tests.families import divergence
from tests.ptq.plan.test_layer_schemes import reference
from tests.ptq.quantizing import (
    FEW,
    add_outliers,
    edit_model,
    executed,
    files,
    make_plan,
    observed_work,
    per_channel,
    quantized,
    random_tokens,
)
from tests.refusals import refused_checkpoint

ROOT = Path(__file__).resolve().parents[3]
RTN = (RTNSpec(),)


@torch.no_grad()
def losses(checkpoint: Checkpoint, model: Path, ids: torch.Tensor) -> tuple[float, float]:
    """KL of a checkpoint's numbers in transformers from those of the model; that of any token."""
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits
    found = reference(model, checkpoint)(ids).logits
    return divergence(found, exact), divergence(torch.zeros_like(exact), exact)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {}),
        ("mistral", {"num_key_value_heads": 1, "sliding_window": 16}),
    ],
)
@pytest.mark.parametrize("scheme", ["a8w8c8", "a8w8_dynamic"])
def test_every_family_from_model_to_checkpoint(make_model, tmp_path, family, overrides, scheme):
    model = make_model(family, **overrides)
    result = quantized(model, tmp_path / "out", scheme)
    checkpoint = Checkpoint.open(result.checkpoint, verify=True)
    assert checkpoint.scheme.wac == scheme
    assert len(checkpoint.quantized_modules) == 14
    assert len(result.modules) == 14
    assert len(result.smoothing) == 8
    assert any(row.alpha is not None for row in result.smoothing)
    lost, unknown = losses(checkpoint, model, random_tokens().ids[1:4, :30])
    assert lost < 0.01 * unknown
    source = Checkpoint.open(model)
    touched = {f"{m}.{leaf}" for m in checkpoint.quantized_modules for leaf in ("weight", "bias")}
    for name in source.names():
        if name not in touched:
            assert checkpoint.dtype(name) == source.dtype(name)
        if name not in touched and "layernorm" not in name:
            assert torch.equal(checkpoint.tensor(name), source.tensor(name)), name
        if name.endswith(("q_proj.bias", "k_proj.bias", "o_proj.bias", "down_proj.bias")):
            assert torch.equal(checkpoint.tensor(name), source.tensor(name)), name
    static = scheme == "a8w8c8"
    for block in ("model.layers.0", "model.layers.1"):
        for fused in (("q", "k", "v"), ("gate", "up")):
            part = "self_attn" if fused[0] == "q" else "mlp"
            names = [f"{block}.{part}.{kind}_proj.input_scale" for kind in fused]
            assert [name in checkpoint for name in names] == [static] * len(fused)
            if static:
                assert len({checkpoint.tensor(name).item() for name in names}) == 1


def test_checkpoint_holds_exactly_the_rounded_weights_and_observed_scales(make_model, tmp_path):
    model = make_model("qwen2")
    result = quantized(model, tmp_path / "out", methods=RTN)
    checkpoint, source = Checkpoint.open(result.checkpoint), Checkpoint.open(model)
    statistics = Statistics.load(tmp_path / "out" / "statistics.safetensors")
    for module in checkpoint.quantized_modules:
        q, scale = per_channel(source.tensor(f"{module}.weight"))
        assert torch.equal(checkpoint.tensor(f"{module}.weight"), q)
        assert torch.equal(checkpoint.tensor(f"{module}.weight_scale"), scale)
        seen = statistics[module, "input"]
        assert seen.tokens == random_tokens().tokens
        assert checkpoint.tensor(f"{module}.input_scale").item() == (
            torch.tensor(seen.absmax) / 127
        )
        entry = result.scale_table.get(module, "input")
        assert entry is not None
        assert (entry.statistic, entry.absmax, entry.tokens, entry.clip_fraction) == (
            "absmax",
            seen.absmax,
            seen.tokens,
            0.0,
        )
        assert entry.sqnr_db is not None
        assert 15 < entry.sqnr_db < 60
    for attention, scales in checkpoint.kv_scales.items():
        for role, scale in zip(("k_cache", "v_cache"), scales, strict=True):
            heads = statistics[attention, role].channel_absmax.amax(dim=1)
            assert torch.equal(scale, heads / 127)
    assert len(result.scale_table.entries) == 2 * 14 + 2 * 2
    assert result.smoothing == ()
    assert all(row.output_sqnr_db == row.baseline_output_sqnr_db for row in result.modules)
    assert all(row.weight_sqnr_db == row.baseline_weight_sqnr_db for row in result.modules)


def test_smoothing_recovers_what_outliers_cost(tiny_llama, tmp_path):
    model = edit_model(tiny_llama, tmp_path / "outliers", add_outliers)
    plain = quantized(model, tmp_path / "plain", "a8w8", methods=RTN)
    smooth = quantized(model, tmp_path / "smooth", "a8w8")
    found = (Checkpoint.open(result.checkpoint) for result in (plain, smooth))
    (cost, _), (smoothed, _) = (losses(f, model, random_tokens().ids[1::2]) for f in found)
    assert smoothed < cost / 20
    for row in smooth.modules:
        if row.module.endswith("down_proj"):
            assert row.output_sqnr_db is not None
            assert row.baseline_output_sqnr_db is not None
            assert row.output_sqnr_db > row.baseline_output_sqnr_db + 15
    baseline = {row.module: row.baseline_output_sqnr_db for row in smooth.modules}
    assert baseline["model.layers.0.mlp.down_proj"] == next(
        row.output_sqnr_db for row in plain.modules if row.module == "model.layers.0.mlp.down_proj"
    )


def test_the_checkpoint_does_not_depend_on_the_order_of_samples(tiny_llama, tmp_path):
    tokens = random_tokens()
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    shuffled = TokenSet(tokens.ids[order], tokens.mask[order], tokens.source, tokens.split)
    results = [
        quantize_tokens(make_plan(tiny_llama, tmp_path / name), given, progress=False)
        for name, given in (("a", tokens), ("b", shuffled), ("c", tokens))
    ]
    assert results[0].smoothing == results[1].smoothing == results[2].smoothing
    a, b, c = (files(tmp_path / name) for name in "abc")
    for name in a.keys() - {"quantization.json", "recipe.yaml"}:
        assert a[name] == b[name] == c[name], name
    assert len(a) > 8


def test_only_the_cache(tiny_llama, tmp_path):
    result = quantized(tiny_llama, tmp_path / "out", "c8", methods=())
    checkpoint, source = (
        Checkpoint.open(result.checkpoint, verify=True),
        Checkpoint.open(tiny_llama),
    )
    assert checkpoint.names() == source.names()
    for name in source.names():
        assert checkpoint.dtype(name) == source.dtype(name)
        assert torch.equal(checkpoint.tensor(name), source.tensor(name))
    assert set(checkpoint.kv_scales) == {f"model.layers.{i}.self_attn" for i in range(2)}
    assert {entry.role for entry in result.scale_table.entries} == {"k_cache", "v_cache"}
    assert result.modules == ()


def test_cache_per_tensor_has_one_scale(tiny_llama, tmp_path):
    scheme = Scheme(kv_cache=KVCacheSpec(granularity="per_tensor"))
    result = quantized(tiny_llama, tmp_path / "out", scheme, methods=())
    statistics = Statistics.load(tmp_path / "out" / "statistics.safetensors")
    for attention, (k, v) in Checkpoint.open(result.checkpoint).kv_scales.items():
        assert k.tolist() == [torch.tensor(statistics[attention, "k_cache"].absmax).div(127)] * 2
        assert v.tolist() == [torch.tensor(statistics[attention, "v_cache"].absmax).div(127)] * 2


def test_ignored_layers_stay_as_they_are(tiny_llama, tmp_path):
    pattern = r"re:model\.layers\.1\.mlp\..*"
    result = quantized(tiny_llama, tmp_path / "out", ignore=("lm_head", pattern))
    checkpoint, source = (
        Checkpoint.open(result.checkpoint, verify=True),
        Checkpoint.open(tiny_llama),
    )
    ignored = {f"model.layers.1.mlp.{kind}_proj" for kind in ("gate", "up", "down")}
    assert not ignored & set(checkpoint.quantized_modules)
    assert len(checkpoint.quantized_modules) == 11
    for module in ignored:
        assert torch.equal(checkpoint.tensor(f"{module}.weight"), source.tensor(f"{module}.weight"))
        assert result.scale_table.get(module, "input") is None
    norm = "model.layers.1.post_attention_layernorm.weight"
    assert torch.equal(checkpoint.tensor(norm), source.tensor(norm))
    assert {row.source for row in result.smoothing} >= {"model.layers.1.input_layernorm"}
    assert not any("layers.1.mlp" in row.source for row in result.smoothing)


def test_record_recipe_and_statistics_are_beside_the_checkpoint(tiny_llama, tmp_path):
    plan = make_plan(tiny_llama, tmp_path / "out")
    result = quantize(plan, progress=False)
    assert load_result(tmp_path / "out") == result
    assert load_recipe(tmp_path / "out" / "recipe.yaml") == plan.recipe
    assert len(Statistics.load(tmp_path / "out" / "statistics.safetensors")) == 2 * (7 + 2)
    assert result.calibration.source == "stdlib"
    assert result.calibration.tokens == 8 * 64
    assert result.calibration.sequences == 8
    assert len(result.calibration.fingerprint) == 64
    parts = sum(seconds for phase, seconds in result.seconds.items() if phase != "total")
    assert 0.8 * result.seconds["total"] < parts <= result.seconds["total"]
    assert 50e6 < result.peak_rss_bytes <= peak_rss_bytes()
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    assert load_result(moved).modules == result.modules


def test_a_damaged_record_is_refused(tiny_llama, tmp_path):
    quantized(tiny_llama, tmp_path / "out", methods=RTN)
    record = tmp_path / "out" / "quantization.json"
    record.write_text(record.read_text()[:-20])
    refused_checkpoint(r"quantization\.json", load_result, tmp_path / "out")
    refused_checkpoint("nothing", load_result, tmp_path / "nothing")


def test_clipping_observers_are_told_of(tiny_llama, tmp_path):
    observers = ObserversSpec(
        input=ObserverSpec(method="percentile", percentile=99.0),
        kv_cache=ObserverSpec(method="percentile", percentile=99.0),
    )
    result = quantized(tiny_llama, tmp_path / "out", methods=RTN, observers=observers)
    clipping = [event for event in result.events if event.kind == "clipping"]
    assert len(clipping) == 14 + 4
    entry = result.scale_table.get("model.layers.0.self_attn", "k_cache")
    assert entry is not None
    assert entry.statistic == "percentile"
    assert 0.001 < entry.clip_fraction <= 0.01
    assert entry.scale_max * 127 < entry.absmax


def test_existing_output_needs_force(tiny_llama, tmp_path):
    plan = make_plan(tiny_llama, tmp_path / "out", methods=RTN)
    first = executed(plan)
    refused_checkpoint("exists already", executed, plan)
    again = executed(plan, force=True)
    assert again.scale_table == first.scale_table


@pytest.mark.parametrize("layer", [0, 1])
def test_not_a_number_stops_the_run_and_leaves_nothing(tiny_llama, tmp_path, layer):
    def poison(tensors):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"][5] = 3e38  # its products are infinite

    model = edit_model(tiny_llama, tmp_path / "poisoned", poison)
    plan = make_plan(model, tmp_path / "out")
    with pytest.raises(RecipeError, match=rf"model\.layers\.{layer}\.mlp\.down_proj"):
        executed(plan)
    assert not (tmp_path / "out").exists()


def test_methods_see_every_token_of_every_layer(tiny_llama, tmp_path):
    class Counter(Method):
        def __init__(self) -> None:
            self.tokens: dict[str, int] = {}
            self.calls: list[str] = []

        def prepare(self, work: BlockWork) -> None:
            self.calls.append("prepare")

        def observe(self, name: str, x: torch.Tensor, sample: int) -> None:
            assert x.shape[1] == (256 if name.endswith("down_proj") else 128)
            self.tokens[name] = self.tokens.get(name, 0) + len(x)

        def solve(self, work: BlockWork) -> None:
            raise AssertionError("observing does not solve")

        def commit(self, work: BlockWork) -> None:
            raise AssertionError("observing does not commit")

    counter, work = Counter(), observed_work(make_plan(tiny_llama, tmp_path))
    observe(work, [counter])
    assert counter.calls == ["prepare"]
    assert counter.tokens == dict.fromkeys(work.block.linears, random_tokens().tokens)


def test_statistics_are_those_of_the_smoothed_model(tiny_llama, tmp_path):
    """Scales in the checkpoint belong to the folded weights, not to the model as it came."""
    result = quantized(tiny_llama, tmp_path / "out", "a8w8")
    before = observed_work(make_plan(tiny_llama, tmp_path / "other", methods=RTN))
    smoothed = {row.source: row for row in result.smoothing if row.alpha is not None}
    row = smoothed["model.layers.0.mlp.up_proj"]
    (down,) = row.consumers
    entry = result.scale_table.get(down, "input")
    assert entry is not None
    seen = before.observed(down, "input").absmax
    assert seen / row.scale_max <= entry.absmax * (1 + 1e-5)
    assert entry.absmax < 0.9 * seen or row.scale_min < 1


MEMORY_SCRIPT = """
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
import ptq
import torch

torch.set_num_threads(1)
from tests.ptq.quantizing import make_plan, random_tokens
from ptq.methods.rtn import RTNSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.pipeline.driver import quantize_tokens

model, output = map(Path, sys.argv[1:])
methods = (SmoothQuantSpec(alpha=0.8, search_samples=1), RTNSpec())
plan = make_plan(model, output, methods=methods)
result = quantize_tokens(plan, random_tokens(2, 16), progress=False)
print(result.peak_rss_bytes)
"""


@pytest.mark.ci  # what grows is seen beside the interpreter's own memory only in large models
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads peak memory from /proc")
def test_peak_memory_does_not_grow_with_depth(make_model, tmp_path):
    """32 layers hold 4 times the weights of 8: their fp32 copy alone would be 30% of the peak."""
    script = MEMORY_SCRIPT.format(root=str(ROOT))
    # glibc gives freed tensors back at once: measured is what is held, not how the heap is cut up
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    peaks = {}
    for layers in (8, 32):
        model = make_model(
            layers=layers,
            hidden_size=384,
            intermediate_size=1152,
            num_attention_heads=6,
            head_dim=64,
        )
        command = [sys.executable, "-c", script, str(model), str(tmp_path / str(layers))]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=500
        )
        assert done.returncode == 0, done.stderr
        peaks[layers] = int(done.stdout)
    assert peaks[32] < 1.1 * peaks[8], peaks


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_a_method_that_changes_what_a_block_computes_is_told(
    tiny_llama, tmp_path, monkeypatch, share
):
    """Layers are compared with the block that it left, so their rows look better than they are."""

    def shrunk(self, work):
        for name in work.targets:
            work.store(f"{name}.weight", work.block.linears[name].weight * share)

    monkeypatch.setattr(Clip, "folds", True)
    monkeypatch.setattr(Clip, "commit", shrunk)
    methods = (ClipSpec(factors=(0.9,), search_samples=1), RTNSpec())
    result = quantize_tokens(
        make_plan(tiny_llama, tmp_path / "out", methods=methods), random_tokens(), progress=False
    )
    told = [event for event in result.events if event.kind == "changed_function"]
    assert [event.module for event in told] == (
        [] if share == 1 else ["model.layers.0", "model.layers.1"]
    )
    assert all("clip changed the float block's output by " in event.message for event in told)


def test_a_table_grows_while_it_runs(tiny_llama, tmp_path, capsys):
    """A row for each block: its worst layer, and its cost; the record has all layers."""
    plan = make_plan(tiny_llama, tmp_path / "out", "w4", methods=(RTNSpec(),))
    result = quantize_tokens(plan, random_tokens(), progress=True)
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if "_proj" in line}
    assert list(rows) == list(plan.blocks)
    assert len(lines) == 1 + len(plan.blocks)  # under a head, and nothing else without a terminal
    for block, (name, sqnr, baseline, share, *cost) in rows.items():
        modules = [row for row in result.modules if row.module.startswith(f"{block}.")]
        worst = min(modules, key=lambda row: row.output_sqnr_db)
        assert f"{block}.{name}" == worst.module
        assert sqnr == f"{worst.output_sqnr_db:.1f}"
        assert baseline == f"{worst.baseline_output_sqnr_db:.1f}"
        entries = [e for e in result.scale_table.entries if e.module.startswith(f"{block}.")]
        clipped = max(entry.clip_fraction for entry in entries)
        assert float(share[:-1]) == pytest.approx(100 * clipped, abs=1e-3)
        assert len(cost) == 3  # seconds, a size and its unit
    assert [row.block for row in result.blocks] == list(plan.blocks)
    assert all(row.seconds > 0 and row.memory_bytes > 0 for row in result.blocks)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("w8_rtn", "model.layers.1.mlp.gate_proj.weight"),
        ("w4_gptq", "model.layers.0.self_attn.k_proj.weight"),
        ("a8w8", "model.layers.1.input_layernorm.weight"),
        ("w4_head8", "lm_head.weight"),
        ("w4_rotated", "model.layers.1.post_attention_layernorm.weight"),
    ],
)
def test_a_weight_that_is_not_finite_is_named(recipe, name, make_model, tmp_path):
    def poison(tensors):
        tensors[name].view(-1)[7] = float("nan")

    model = edit_model(make_model("llama", tie_word_embeddings=False), tmp_path / "model", poison)
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        ptq.quantize(
            recipe,
            model=model,
            output=tmp_path / "out",
            progress=False,
            overrides=FEW,
        )
