"""Mixtures of experts run as transformers runs them, quantized as their numbers say, in any batch."""

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.scheme import PRESETS
from inference.cpu.decoder import feed_forward
from inference.engine import Engine
from inference.models.layers import MixtureOfExperts
from inference.requests.request import SamplingParams
from kernels.numerics import dequantize, fake_quantize
from tests.experts import MOE, split_model
from tests.families import transformers_logits
from tests.inference.engines import engine_of
from tests.inference.models.test_model import token_ids
from tests.ptq.quantizing import edit_model


@pytest.mark.parametrize("family", MOE)
def test_logits_are_those_of_transformers(make_model, family):
    folder = make_model(family, **MOE[family])
    engine = Engine.from_pretrained(folder)
    kinds = [type(layer.feed_forward).__name__ for layer in engine.model.layers]
    assert kinds == [
        "MixtureOfExperts",
        "GatedMLP" if family == "qwen3_moe" else "MixtureOfExperts",
    ]
    want = transformers_logits(folder, token_ids(80))
    torch.testing.assert_close(engine.score(token_ids(80)), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize("preset", ["a8w8_dynamic", "w4"])
def test_a_quantized_checkpoint_computes_what_its_numbers_say(
    make_model, make_quantized, family, preset
):
    """Against transformers with dequantized weights and, for int8, inputs rounded token by token."""
    source = make_model(family, **MOE[family])
    checkpoint = Checkpoint.open(make_quantized(source, preset))
    state = {n: checkpoint.tensor(n) for n in checkpoint.names() if n in Checkpoint.open(source)}
    for name in checkpoint.quantized_modules:
        weight = checkpoint.weight(name)
        block = PRESETS[preset].weights.block
        state[f"{name}.weight"] = dequantize(weight.q, weight.scale, weight.zero_point, block)
    model = split_model(source, state)
    for name in checkpoint.quantized_modules if preset == "a8w8_dynamic" else ():
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, x: (fake_quantize(x[0], x[0].abs().amax(-1, keepdim=True) / 127),)
        )
    assert sum(".experts." in name for name in checkpoint.quantized_modules) >= 3 * 8
    engine = Engine.from_pretrained(checkpoint.path)
    x = torch.randn(60, 128, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        layer = model.get_submodule("model.layers.0").mlp(x[None])[0]
        want = model(token_ids(80)[None]).logits[0]
    got = feed_forward(engine.model.layers[0].feed_forward, x)
    # A last bit can move a value over a rounding edge: in few tokens of a layer, in more of two.
    errors = (got - layer).norm(dim=-1) / layer.norm(dim=-1)
    rounded = 2e-4  # of inputs in fp32, which are int16 to integers in groups
    assert (errors < (5e-6 if preset == "a8w8_dynamic" else rounded)).float().mean() >= 0.95
    got = engine.score(token_ids(80))
    assert (got - want).norm() / want.norm() < (2e-2 if preset == "a8w8_dynamic" else rounded)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("preset", [None, "a8w8_dynamic"])
def test_a_tokens_bits_do_not_depend_on_its_batch(make_model, make_quantized, family, preset):
    folder = make_quantized(make_model(family, **MOE[family]), preset)
    engine = Engine.from_pretrained(folder)
    moe = engine.model.layers[0].feed_forward
    assert isinstance(moe, MixtureOfExperts)
    x = torch.randn(37, 128, generator=torch.Generator().manual_seed(1))
    whole = feed_forward(moe, x)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(2))
    assert torch.equal(feed_forward(moe, x[order]), whole[order])
    for start, stop in ((0, 1), (5, 8), (30, 37)):
        assert torch.equal(feed_forward(moe, x[start:stop]), whole[start:stop])
    texts = [f"def f{i}(a, b):\n    return" + " a" * i for i in range(6)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    want = [out.token_ids for out in engine.generate(texts, params)]
    runner = engine_of(folder, max_batch_size=2, max_batched_tokens=5)
    small = runner.generate(texts[::-1], params)
    assert [out.token_ids for out in small][::-1] == want


def test_a_router_of_other_experts_is_refused(make_model, tmp_path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.block_sparse_moe.gate.weight"
        tensors[name] = torch.cat([tensors[name], tensors[name]])

    copy = edit_model(make_model("mixtral", **MOE["mixtral"]), tmp_path / "copy", change)
    with pytest.raises(CheckpointError, match=r"layers\.1.*chooses among 8 experts.* says 4"):
        Engine.from_pretrained(copy)
