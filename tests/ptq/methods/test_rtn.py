"""Rounding to nearest, and the pieces that every method shares."""

import pytest
import torch

from calibrate.spec import ObserverSpec
from kernels.numerics import TINY_SCALE
from ptq.methods.common.block import replaced
from ptq.methods.common.rounding import round_to_nearest
from ptq.methods.rtn import RoundToNearest, RTNSpec
from ptq.recipe.schema import ObserversSpec
from tests.ptq.quantizing import make_plan, observed_work, per_channel, solved

RTN = (RTNSpec(),)


def test_weights_are_rounded_per_channel_to_half_even():
    weight = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0], [-2.54, 1.2, 0.0, 0.009]])
    q, scale = per_channel(weight)
    assert q.dtype == torch.int8
    assert q[0].tolist() == [127, 0, 2, -2]
    assert q[1].tolist() == [0, 0, 0, 0]
    assert q[2].tolist() == [-127, 60, 0, 0]
    assert scale.shape == (3, 1)
    assert scale[0, 0] == 1.0
    assert scale[1, 0] == TINY_SCALE


def test_rounding_error_is_at_most_half_a_step(tiny_llama, tmp_path):
    work = observed_work(make_plan(tiny_llama, tmp_path, methods=RTN))
    solved = round_to_nearest(work)
    assert set(solved) == set(work.block.linears)
    for name, layer in solved.items():
        weight = work.block.linears[name].weight
        assert bool(((weight - layer.dequantized()).abs() <= layer.weight.scale / 2 * 1.0001).all())
        assert bool((layer.weight.q.abs().amax(dim=1) == 127).all())


def test_input_scale_is_absmax_over_127_and_shared_by_fused_layers(tiny_llama, tmp_path):
    work = observed_work(make_plan(tiny_llama, tmp_path, methods=RTN))
    solved = round_to_nearest(work)
    largest = 0.0
    for sample in range(len(work.block.inputs)):
        seen: dict[str, float] = {}
        work.block.run(sample, on_input=lambda n, x, s=seen: s.update({n: x.abs().max().item()}))
        largest = max(largest, seen["model.layers.0.mlp.down_proj"])
    scale = solved["model.layers.0.mlp.down_proj"].input_scale
    assert scale is not None
    assert scale.tolist() == [torch.tensor(largest).div(127).item()]
    for fused in (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ):
        scales = {
            torch.as_tensor(solved[f"model.layers.0.{name}"].input_scale).item() for name in fused
        }
        assert len(scales) == 1


def test_input_scale_follows_the_observer(tiny_llama, tmp_path):
    name = "model.layers.0.mlp.down_proj"
    scales = {}
    for spec in (ObserverSpec(), ObserverSpec(method="percentile", percentile=99.0)):
        observers = ObserversSpec(input=spec)
        work = observed_work(make_plan(tiny_llama, tmp_path, methods=RTN, observers=observers))
        scale = work.input_scale(name)
        assert scale is not None
        scales[spec.method] = scale.item()
    assert scales["percentile"] < 0.9 * scales["absmax"]


def test_dynamic_inputs_have_no_scale(tiny_llama, tmp_path):
    work = observed_work(make_plan(tiny_llama, tmp_path, "a8w8_dynamic", methods=RTN))
    assert all(layer.input_scale is None for layer in round_to_nearest(work).values())


def test_only_commit_hands_over(tiny_llama, tmp_path):
    work = observed_work(make_plan(tiny_llama, tmp_path, methods=RTN))
    before = {name: linear.weight.clone() for name, linear in work.block.linears.items()}
    method = solved(work, RoundToNearest(RTNSpec()), see=False)
    assert not work.quantized
    method.commit(work)
    assert set(work.quantized) == set(before)
    assert all(torch.equal(work.block.linears[n].weight, w) for n, w in before.items())


def test_replaced_is_undone_after_an_error():
    linear = torch.nn.Linear(4, 4)
    weight, x = linear.weight, torch.ones(1, 4)
    expected = linear(x)

    def fail() -> None:
        with replaced(linear, torch.zeros(4, 4), lambda x: x):
            assert torch.equal(linear(x), linear.bias[None])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert linear.weight is weight
    assert torch.equal(linear(x), expected)
