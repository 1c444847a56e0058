"""Clipping of static inputs by the error of the block's output."""

import pytest
import torch

from ptq.methods.clip import Clip, ClipSpec
from ptq.methods.rtn import RTNSpec
from ptq.recipe.reading import load_recipe
from tests.ptq.quantizing import make_plan, observed_work, quantized, solved
from tests.refusals import refused_recipe

METHODS = (ClipSpec(search_samples=3), RTNSpec())
DOWN = "model.layers.0.mlp.down_proj"


def block_error(work, name: str, factor: float) -> float:
    """Error of the block's outputs with one layer's input and weight rounded."""
    scale = work.input_scale(name) * factor
    linear = work.block.linears[name]
    rounded = round_int8(linear.weight)
    total = 0.0
    for sample in range(3):
        exact = work.block.run(sample)
        original, linear.weight = linear.weight, torch.nn.Parameter(rounded)
        handle = linear.register_forward_pre_hook(
            lambda _, args: ((args[0] / scale).round().clamp(-127, 127) * scale,)
        )
        total += (work.block.run(sample) - exact).double().square().sum().item()
        handle.remove()
        linear.weight = original
    return total


def round_int8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round() * scale


def test_it_takes_the_factor_of_least_error(tiny_llama, tmp_path):
    work = observed_work(make_plan(tiny_llama, tmp_path, "a8w8", methods=METHODS))
    rare = work.observed(DOWN, "input")
    rare.channel_absmax *= 4  # as if one value that matters little had been seen
    method = solved(work, Clip(METHODS[0]), see=False)
    factors = (1.0, *METHODS[0].factors)
    errors = {factor: block_error(work, DOWN, factor) for factor in factors}
    best = min(errors, key=lambda factor: errors[factor])
    assert best < 1.0
    assert method.solved[DOWN] == best
    before = work.input_absmax(DOWN)
    method.commit(work)
    assert work.input_absmax(DOWN) == before * best


def test_layers_of_one_input_share_a_range_and_the_table_tells(tiny_llama, tmp_path):
    result = quantized(tiny_llama, tmp_path / "out", "a8w8", methods=METHODS)
    rows = {e.module: e for e in result.scale_table.entries if e.role == "input"}
    q, k, v = (rows[f"model.layers.1.self_attn.{part}_proj"] for part in "qkv")
    assert q.scale_min == k.scale_min == v.scale_min
    cut = [row for row in rows.values() if row.statistic != "absmax"]
    assert cut
    for row in cut:
        assert row.statistic.endswith("searched")
        factor = float(row.statistic.split(" x ")[1].split(",")[0])
        assert row.scale_min == pytest.approx(row.absmax * factor / 127, rel=1e-6)
        assert row.clip_fraction > 0


def test_it_is_for_static_inputs_before_rounding(tmp_path, tiny_llama):
    path = tmp_path / "r.yaml"
    text = f"model: {{path: {tiny_llama}}}\noutput: {{path: out}}\n"
    path.write_text(text + "scheme: a8w8_dynamic\nmethods: [clip, rtn]\n")
    refused_recipe("clip chooses ranges of static inputs", load_recipe, path)
    path.write_text(text + "scheme: a8w8\nmethods: [clip, {smoothquant: {alpha: 0.5}}, rtn]\n")
    refused_recipe("the order is smoothquant, clip, rtn", load_recipe, path)
