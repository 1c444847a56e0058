"""Q4_K from the solver to a .gguf file: what `gguf` dequantizes there are the weights solved here."""

import gguf
import numpy as np
import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.gguf.blocks import SUPER_BLOCKS, packed, unpacked
from formats.gguf.file import GgufFile
from formats.gguf.unpack import unpack
from formats.scheme import PRESETS, Scheme, WeightSpec
from formats.stored.weights import StoredWeight
from kernels.numerics import dequantize
from ptq.convert.convert import convert
from ptq.methods.common.rounding import round_weight
from ptq.methods.gptq import GPTQSpec
from ptq.methods.hqq import HQQSpec
from ptq.methods.refine import RefineSpec
from ptq.methods.registry import method_fault
from ptq.methods.rtn import RTNSpec
from ptq.methods.two_sided import TwoSidedSpec
from ptq.pipeline.driver import quantize_tokens
from tests.families import divergence
from tests.formats.gguf.test_gguf import logits
from tests.ptq.quantizing import make_plan, random_tokens

SCHEME = PRESETS["w4_q4_k"]
Q4_K = SUPER_BLOCKS.weights or WeightSpec()
Q4_0 = WeightSpec(dtype="int4", granularity="group", group_size=32)
Q4_1 = Q4_0.model_copy(update={"symmetric": False})
SEARCHES = ("absmax", "mse", "weighted_mse", "output_mse")


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of two super-blocks a row, some odd ones among them, and moments of its inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 512, generator=generator) @ torch.randn(512, 512, generator=generator)
    weight = torch.randn(24, 512, generator=generator)
    weight *= torch.rand(24, 16, generator=generator).repeat_interleave(32, 1) + 0.3
    weight[0], weight[1, :256], weight[2, 64:96] = 0, 0, 0
    weight[3], weight[4], weight[5] = weight[3].abs(), -weight[4].abs(), weight[5] * 1e-5
    return weight, x.T @ x / len(x)


def dequantized(stored: StoredWeight) -> torch.Tensor:
    return dequantize(stored.q, stored.scale, stored.zero_point, (1, 32))


@pytest.mark.parametrize("search", SEARCHES)
def test_what_is_solved_is_what_the_file_holds(search):
    weight, moments = problem()
    stored = round_weight(weight, Q4_K, torch.bfloat16, search, moments)
    data = packed("Q4_K", stored)
    assert data.shape == (24, 2 * 144)
    rounding = 2.0**-22 * stored.scale * (16 + stored.zero_point.abs())
    there = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType.Q4_K))
    error = (dequantized(stored) - there).abs()
    assert (error <= rounding.repeat_interleave(32, 1)).all()
    assert torch.equal(dequantized(stored)[0], torch.zeros(512))
    again = unpacked("Q4_K", data, SUPER_BLOCKS)
    assert torch.equal(again.q, stored.q)
    assert torch.equal(again.scale, stored.scale)
    assert np.array_equal(packed("Q4_K", again), data)


def test_without_a_search_whole_ranges_are_taken():
    """By numpy: d and e from the largest scale and minimum of 8 groups, the nearest multiples."""
    weight, _ = problem()
    w = weight[6:].numpy().reshape(18, 2, 8, 32)
    low, high = -np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
    units = [
        np.asarray(x.max(-1) / 63, np.float16).astype(np.float32) for x in ((high + low) / 15, low)
    ]
    s, m = (
        np.clip(np.round(x / unit[..., None]), 0, 63) * unit[..., None]
        for x, unit in zip(((high + low) / 15, low), units, strict=True)
    )
    q = np.clip(np.round((w + m[..., None]) / s[..., None]), 0, 15)
    wanted = torch.from_numpy(q * s[..., None] - m[..., None]).view(18, 512)
    found = dequantized(round_weight(weight, Q4_K, torch.float32))[6:]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("search", SEARCHES[1:])
def test_it_loses_less_than_q4_0_and_no_more_than_its_own_start(search):
    weight, moments = problem()
    if search == "weighted_mse":
        measure = torch.diag(moments.diagonal())
    else:
        measure = torch.eye(512) if search == "mse" else moments
        measure = measure * torch.block_diag(*[torch.ones(32, 32)] * 16)

    def error(spec: WeightSpec, search) -> float:
        stored = round_weight(weight, spec, torch.float16, search, moments)
        left = weight - dequantize(stored.q, stored.scale, stored.zero_point, spec.block)
        return float(((left @ measure) * left).sum())

    assert error(Q4_K, search) < 0.9 * min(error(Q4_0, search), error(Q4_K, "absmax"))


def test_a_file_of_llama_cpp_is_packed_back():
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (8, 3, 144), dtype=np.uint8)
    units = np.abs(generator.normal(0, 0.01, (8, 3, 2))).astype(np.float16)
    blocks[..., :4] = units.view(np.uint8)
    blocks[..., 4] |= 63  # the largest scale and minimum are 63 units: group 0's
    blocks[..., 8] |= 63
    blocks[..., 5:8] |= 1  # no scale is 0
    blocks[..., 12:16] |= 1
    data = blocks.reshape(8, -1)
    assert np.array_equal(packed("Q4_K", unpacked("Q4_K", data, SUPER_BLOCKS)), data)


def test_what_has_no_units_is_refused():
    stored = round_weight(problem()[0][6:], Q4_1, torch.float32)
    wrong = StoredWeight(stored.q, stored.scale, stored.zero_point.float())
    with pytest.raises(ValueError, match="no multiples of 6 bits"):
        packed("Q4_K", wrong)
    with pytest.raises(ValueError, match="found a weight of 96 inputs"):
        round_weight(torch.ones(4, 96), Q4_K, torch.float32)
    given = Q4_K.model_dump()
    for change in ({"group_size": 64}, {"dtype": "int8"}, {"symmetric": True}):
        with pytest.raises(ValueError, match=r"found (two_level|zero_points: float) for"):
            WeightSpec.model_validate(given | change)


@pytest.mark.parametrize("method", [GPTQSpec(), HQQSpec(), RefineSpec()])
def test_methods_of_other_scales_are_refused_by_name(method, tiny_llama, tmp_path):
    methods = (RTNSpec(), method) if method.name == "refine" else (method,)
    wanted = f"found {method.name}; .* are made by rtn or two_sided alone"
    with pytest.raises(ValueError, match=wanted):
        make_plan(tiny_llama, tmp_path, SCHEME, methods=methods)
    plain = Scheme(weights=Q4_1)
    assert method_fault(methods, plain, (plain,)) is None


def test_from_a_recipe_to_a_file_and_back(make_model, tmp_path):
    """256 divides all inputs but those of o_proj and down_proj."""
    model = make_model("llama", hidden_size=256, intermediate_size=288)
    plans = [
        make_plan(model, tmp_path / scheme.wac, scheme, methods=(TwoSidedSpec(sweeps=1),))
        for scheme in (Scheme(weights=Q4_0), SCHEME)
    ]
    other, made = (quantize_tokens(p, random_tokens(), progress=False).checkpoint for p in plans)
    exact = logits(model)
    assert divergence(logits(made), exact) < 0.9 * divergence(logits(other), exact)
    convert(made, tmp_path / "Q4_K.gguf", "gguf")
    plan = plans[1]
    assert "group of 32, asymmetric, float zero points, two-level scales" in plan.modules[0].reason
    (note,) = (note for note in plan.groups if "256 does not divide" in note)
    wanted = "groups of 32 with integer zero points in 4 of 14 layers, whose 128 or 288 inputs 256"
    assert note.startswith(wanted)
    assert note.endswith("than in super-blocks of 256")
    tensors = GgufFile(tmp_path / "Q4_K.gguf").tensors
    kinds = {name.removeprefix("blk.0."): stored.kind for name, stored in tensors.items()}
    assert kinds["attn_q.weight"] == kinds["ffn_up.weight"] == "Q4_K"
    assert kinds["ffn_down.weight"] == "Q4_1"
    unpack(tmp_path / "Q4_K.gguf", tmp_path / "back")
    # Of Q4_1 minima are rounded to fp16; which weights two_sided finds depends on the processor.
    torch.testing.assert_close(logits(made), logits(tmp_path / "back"), atol=4e-3, rtol=0)
    assert Checkpoint.open(made).scheme == SCHEME
    convert(tmp_path / "back", tmp_path / "again.gguf", "gguf")
    again = GgufFile(tmp_path / "again.gguf").tensors
    assert all(np.array_equal(tensors[name].data, again[name].data) for name in tensors)
