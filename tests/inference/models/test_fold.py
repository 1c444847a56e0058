"""What is folded into tensors at load: channels of heads in another order, with all that is theirs."""

from dataclasses import replace

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.families.registry import BY_TYPE
from formats.families.sizes import rotary_order
from formats.scheme import PRESETS, KVCacheSpec, Scheme
from inference.cpu.backend import CpuBackend
from inference.cpu.layers import pack_linear
from inference.engine import Engine
from inference.models.decoder import Decoder
from inference.models.parts import held_heads, held_rows, held_scales, with_divided_input
from inference.models.read import StoredLinear
from kernels.numerics import TYPES
from ptq.pipeline.driver import quantize_tokens
from tests.families import distance
from tests.ptq.quantizing import edit_model, make_plan, random_tokens
from tests.tiny_families import TINY

SIZE, HEADS, KV = 8, 3, 1
CHANNELS = (0, 2, 4, 5, 1, 3, 6, 7)


def test_the_order_of_channels_follows_from_what_turns():
    config = {"hidden_size": 24, "num_attention_heads": 3, "head_dim": SIZE}
    assert tuple(rotary_order(BY_TYPE["glm"], config)) == CHANNELS
    partial = config | {"partial_rotary_factor": 0.5}
    assert rotary_order(BY_TYPE["phi3"], partial) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert rotary_order(BY_TYPE["llama"], config) == list(range(SIZE))


def stored_linear(preset: str) -> StoredLinear:
    """q, k and v merged, of random integers, with everything that a layer can have."""
    generator = torch.Generator().manual_seed(0)
    rows, inputs, scheme = (HEADS + 2 * KV) * SIZE, 32, PRESETS[preset].of_layers
    spec = scheme.weights
    bias = torch.randn(rows, generator=generator)
    if spec is None:
        weight = torch.randn(rows, inputs, generator=generator)
        return StoredLinear([["q", "k", "v"]], scheme, weight, bias=bias)
    kind = TYPES[spec.dtype]
    q = torch.randint(-7, 8, (rows, inputs), generator=generator).to(kind.storage)
    group = 8 if spec.granularity == "group" else inputs
    scale = torch.rand(rows, inputs // group, generator=generator) + 0.1
    zero = None
    if not kind.storage.is_floating_point:
        zero = torch.randint(-2, 3, scale.shape, generator=generator).to(torch.int8)
    if spec.granularity == "group":
        weights = scheme.weights.model_copy(update={"group_size": group})
        scheme = scheme.model_copy(update={"weights": weights})
    order = torch.randperm(inputs, generator=generator)
    return StoredLinear([["q", "k", "v"]], scheme, q, scale, zero, bias, order=order)


@pytest.mark.parametrize("preset", ["c8", "w8", "w4", "fp8_channel"])
def test_rows_of_q_and_k_move_with_all_that_is_theirs(preset):
    stored = stored_linear(preset)
    held = held_heads(stored, HEADS + KV, CHANNELS)
    x = torch.randn(5, 32)
    given, found = (
        pack_linear(s, torch.float32)(x).unflatten(1, (-1, SIZE)) for s in (stored, held)
    )
    assert torch.equal(found[:, : HEADS + KV], given[:, : HEADS + KV][..., CHANNELS])
    assert torch.equal(found[:, HEADS + KV :], given[:, HEADS + KV :])
    assert held_heads(stored, HEADS + KV, None) is stored


def test_norms_and_scales_of_channels_move_too():
    assert held_rows(torch.arange(8.0), CHANNELS).tolist() == list(CHANNELS)
    whole = held_rows(torch.arange(16.0), CHANNELS)
    assert whole[8:].tolist() == [8.0 + channel for channel in CHANNELS]
    found = held_scales((torch.arange(16.0).view(2, 8), torch.ones(2)), CHANNELS)
    assert found[0][1].tolist() == [8.0 + channel for channel in CHANNELS]
    assert found[1].tolist() == [1, 1]
    pair = (torch.ones(2), torch.ones(2))
    assert held_scales(pair, CHANNELS) is pair


def test_a_static_scale_of_what_is_divided_is_divided():
    stored = replace(stored_linear("w8"), input_scale=torch.tensor([0.5]))
    assert with_divided_input(stored, 4.0).input_scale == 0.125
    assert with_divided_input(stored, 1.0) is stored


def test_the_caches_scales_of_channels_are_those_of_channels_that_moved(make_model, tmp_path):
    """K of GLM, whose pairs lie side by side, with channels of very different size."""
    size = 32

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            row = torch.arange(len(tensor)) % size
            if "k_proj." in name:
                tensor[(row == 2) | (row == 3)] *= 64
            if "q_proj." in name:
                tensor[(row == 2) | (row == 3)] /= 64

    source = edit_model(make_model("glm"), tmp_path / "model", change)
    spec = KVCacheSpec(granularity="per_channel")
    plan = make_plan(source, tmp_path / "out", Scheme(kv_cache=spec), methods=())
    quantized = Engine.from_pretrained(
        quantize_tokens(plan, random_tokens(), progress=False).checkpoint
    )
    assert quantized.quantized_kv
    ids = (torch.arange(1, 90) * 7 % 384).tolist()
    assert distance(quantized.score(ids), Engine.from_pretrained(source).score(ids)) < 0.03


def test_queries_grow_only_beyond_the_length_of_training(make_model):
    checkpoint = Checkpoint.open(make_model("ministral3", **TINY["ministral3"]))
    assert Decoder(checkpoint, CpuBackend(), longest=16).query_growth is None
    growth = Decoder(checkpoint, CpuBackend()).query_growth
    assert growth[[0, 15]].tolist() == [1.0, 1.0]
    assert growth[16] == pytest.approx(1 + 0.3 * torch.log(torch.tensor(2.0)).item())
