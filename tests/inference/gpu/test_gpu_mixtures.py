"""Mixtures of experts on the GPU's kernels, interpreted: all experts as one, without the host."""

import re

import pytest
import torch

from inference.gpu import feed_forward, layers
from inference.gpu.feed_forward import MergedExperts, _all_at_once
from inference.models import read
from kernels.numerics import dequantize
from kernels.triton.linear.w16a16 import DenseWeight
from kernels.triton.linear.weight import InputFormat
from tests.experts import MOE
from tests.formats.families.test_glm4_moe import SIZES as GLM
from tests.formats.families.test_gpt_oss import SIZES as GPT_OSS
from tests.inference.gpu.test_gpu import engine_of, logged, on_cpu, prompt, run
from tests.kernels.expert_cases import make_weights
from tests.kernels.triton_lab import distance, interpreted
from tests.mixtures import publish_mxfp4

CASES = [  # family, its own sizes, scheme, and how far logits may be off
    *((family, MOE[family], None, 0.02) for family in MOE),
    *(("qwen2_moe", MOE["qwen2_moe"], *own) for own in (("a8w8c8", 0.1), ("w4", 0.02))),
    *(("mixtral", MOE["mixtral"], own, 0.1) for own in ("a8w8_dynamic", "fp8_block", "a8w8")),
    ("qwen3_moe", MOE["qwen3_moe"], "a8w4", 0.1),
    ("glm4_moe", GLM | {"first_k_dense_replace": 0}, None, 0.02),  # sigmoids, groups, no gate
]


@pytest.mark.parametrize(("family", "sizes", "scheme", "near"), CASES)
@interpreted
def test_logits_are_those_of_the_cpu(make_model, make_quantized, family, sizes, scheme, near):
    """Few steps of integers, and of e4m3; of static scales each expert has its own."""
    folder = make_quantized(make_model(family, layers=1, **sizes), scheme)
    compare(str(folder), near, scales_differ=scheme == "a8w8")


@pytest.mark.parametrize("published", [False, True])
@interpreted
def test_gpt_oss(make_model, tmp_path, published):
    """Sinks, biases and bounded experts, in floats or in MXFP4 as they are stored."""
    folder = make_model("gpt_oss", layers=1, **GPT_OSS)
    compare(str(publish_mxfp4(folder, tmp_path)[0] if published else folder), 0.02)


def tiny(make_model, family: str, **sizes):
    """A model of one block."""
    return make_model(family, layers=1, **(MOE[family] | sizes))


def compare(path: str, tolerance: float, scales_differ: bool = False):
    scales_of, tokens = read._input_scale, prompt(11)

    def of_expert(checkpoint, names, device, many):
        numbers = [re.search(r"experts\.(\d+)\.", modules[0]) for modules in names]
        factors = torch.tensor([0.3 + int(n[1]) if n else 1.0 for n in numbers])
        return scales_of(checkpoint, names, device, many) * factors.view(many)

    with pytest.MonkeyPatch.context() as patch:
        if scales_differ:
            patch.setattr(read, "_input_scale", of_expert)
        wanted = on_cpu(path, tokens)
        engine = engine_of(path)
        patch.setattr(feed_forward, "by_expert", refuse)
        found = engine.score(tokens)
    own = engine.model.layers[0].feed_forward
    for part in (own.gate_up, own.down):
        static = part.merged.rows.scale
        assert (static is not None and static.numel() == 4) is scales_differ
    assert distance(found, wanted) < tolerance


@pytest.mark.parametrize("families", [("w4a16_zeros", "w8a16"), ("w8a8", "w16a16")])
@interpreted
def test_layers_of_an_expert_may_differ_in_their_kernels(families):
    """Many rows of each expert, in tiles that both kernels take."""
    torch.manual_seed(0)
    sizes = ((256, 128), (64, 128))  # outputs and inputs of gate and up, and of down
    weights = [make_weights(name, 2, *size) for name, size in zip(families, sizes, strict=True)]
    rows = [InputFormat(torch.int8 if "a8" in name else torch.float16) for name in families]
    layers = [MergedExperts(own[0], wanted) for (own, _), wanted in zip(weights, rows, strict=True)]
    x, chosen = torch.randn(300, 128).half(), torch.randint(2, (300, 1), dtype=torch.int32)
    found = _all_at_once(*layers, x, chosen, 2)
    few = [_all_at_once(*layers, x[i : i + 1], chosen[i : i + 1], 2) for i in range(0, 300, 37)]
    torch.testing.assert_close(found[::37], torch.cat(few), rtol=0.02, atol=0.02)


def refuse(x: torch.Tensor, chosen: torch.Tensor, experts, run):
    raise AssertionError("experts run one by one")


@interpreted
def test_steps_ahead_give_the_tokens_of_steps_one_by_one(make_model, make_quantized):
    path = str(make_quantized(tiny(make_model, "qwen2_moe"), "a8w8c8"))
    requests = [
        (prompt(3, 1), {"max_tokens": 2, "ignore_eos": True}),
        (prompt(2, 2), {"max_tokens": 3, "ignore_eos": True}),
    ]
    wanted = run(path, requests, eager=True)
    assert [len(tokens) for tokens, _ in wanted] == [2, 3]
    assert run(path, requests, eager=False) == wanted


@interpreted
def test_experts_lie_side_by_side(make_model, make_quantized):
    path = str(make_quantized(tiny(make_model, "mixtral"), "w4"))
    own = engine_of(path).model.layers[0].feed_forward
    for parts, whole in ((x.each, x.merged) for x in (own.gate_up, own.down)):
        for name in ("packed", "scale"):
            tensors = [getattr(layer.weight, name) for layer in parts]
            first = getattr(whole.weight, name)
            places = [t.data_ptr() - first.data_ptr() for t in tensors]
            assert places == [i * first.nbytes for i in range(len(tensors))]
            assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
            assert not torch.equal(tensors[0], tensors[1])
    held = [own.router.weight.weight]
    held += [
        t for x in (own.gate_up.merged, own.down.merged) for t in (x.weight.packed, x.weight.scale)
    ]
    assert own.nbytes == sum(t.untyped_storage().nbytes() for t in held)


@pytest.mark.parametrize("sizes", [{"intermediate_size": 100}, {}])
@interpreted
def test_experts_that_no_kernel_takes_at_once_run_one_by_one(make_model, make_quantized, sizes):
    folder = tiny(make_model, "mixtral", **sizes)
    path = str(make_quantized(folder, None if sizes else "a8w8_dynamic"))
    reason = "no kernel takes rows" if sizes else "not packed alike"
    pack, count = layers.pack, iter(range(100))

    def unlike(*args, **kwargs):
        """Every third layer is dequantized."""
        own = pack(*args, **kwargs)
        values = dequantize(*args[:3]).half()
        return DenseWeight(values, None) if next(count) % 3 == 0 else own

    with pytest.MonkeyPatch.context() as patch, logged() as lines:
        if not sizes:
            patch.setattr(layers, "pack", unlike)
            patch.setattr(read, "TOGETHER", 1)
        engine = engine_of(path)
    own = engine.model.layers[0].feed_forward
    assert own.gate_up.merged is None or own.down.merged is None
    own_lines = [line for line in lines if reason in line]
    assert len(own_lines) == 1, lines
    assert re.search(
        r"layers\.0\.\S+experts\.0\.\S+ and \d+ more: .*without CUDA graphs", own_lines[0]
    )
    assert distance(engine.score(prompt(11)), on_cpu(path, prompt(11))) < 0.1
