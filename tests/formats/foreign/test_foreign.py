"""Foreign layouts, bit by bit: GPTQ, AWQ, FP8 blocks and Paddle's tables."""

import json
import struct

import pytest
import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.foreign.awq import awq_config, pack_awq, read_awq_config, refuse_awq, unpack_awq
from formats.foreign.fp8 import (
    fp8_block_config,
    pack_fp8_block,
    read_fp8_config,
    refuse_fp8_block,
    unpack_fp8_block,
)
from formats.foreign.gptq import (
    dequantize_gptq,
    gptq_config,
    pack_gptq,
    read_gptq_config,
    refuse_gptq,
    unpack_gptq,
)
from formats.foreign.paddle import FILES, paddle_tables, refuse_paddle
from formats.scheme import PRESETS, KVCacheSpec, Scheme, WeightSpec
from formats.stored.weights import StoredWeight
from kernels.numerics import dequantize
from tests.refusals import refused_checkpoint as refused

GENERATOR = torch.Generator().manual_seed(0)
W4 = WeightSpec(dtype="int4", granularity="group", group_size=32)


def signed(word: int) -> int:
    """The int32 of the same bits."""
    return struct.unpack("<i", struct.pack("<I", word))[0]


def random_weight(
    rows: int, columns: int, bits: int, size: int, *, symmetric: bool
) -> StoredWeight:
    half, groups = 1 << (bits - 1), 1 if size == -1 else columns // size
    q = torch.randint(-half, half, (rows, columns), generator=GENERATOR).to(torch.int8)
    scale = (torch.rand(rows, groups, generator=GENERATOR) + 0.1).half().float()
    zeros = torch.randint(-half, half, (rows, groups), generator=GENERATOR).to(torch.int8)
    zeros[0, 0] = -half  # unsigned 0, which version 1 of GPTQ wraps
    return StoredWeight(q, scale, None if symmetric else zeros)


def require_equal(found: StoredWeight, weight: StoredWeight) -> None:
    assert torch.equal(found.q, weight.q)
    assert torch.equal(found.scale, weight.scale)
    assert (found.zero_point is None) == (weight.zero_point is None)
    if weight.zero_point is not None and found.zero_point is not None:
        assert torch.equal(found.zero_point, weight.zero_point)


def values(weight: StoredWeight, size: int) -> Tensor:
    return dequantize(weight.q, weight.scale, weight.zero_point, (1, size))


def pack_gptq_8(weight: StoredWeight) -> dict[str, Tensor]:
    return pack_gptq(weight, 32, 8, version=2)


SIGNED = (
    (lambda weight: pack_gptq(weight, 32, 4), lambda tensors: unpack_gptq(tensors, 4, 1, 32)[0]),
    (pack_gptq_8, lambda tensors: unpack_gptq(tensors, 8, 2, 32)[0]),
    (lambda weight: pack_awq(weight, 32), lambda tensors: unpack_awq(tensors, 32)),
)


def golden_weight() -> StoredWeight:
    """8 outputs of 8 inputs: output n holds -8 + n everywhere, but output 0 counts from -8."""
    q = torch.arange(-8, 0).repeat(8, 1).T.contiguous().to(torch.int8)
    q[0] = torch.tensor([-8, -7, -6, -5, -4, -3, -2, -1])
    zeros = torch.tensor([[-8], [-7], [0], [7], [1], [2], [3], [-1]], dtype=torch.int8)
    return StoredWeight(q, torch.full((8, 1), 0.5), zeros)


def test_gptq_golden_words():
    """Unsigned zero points 0 1 8 15 9 10 11 7; version 1 stores each less one, 0 as 15."""
    tensors = pack_gptq(golden_weight(), -1, 4, version=1)
    assert tensors["qweight"].tolist() == [
        [signed(0x76543210), *(0x11111111 * n for n in range(1, 8))]
    ]
    assert tensors["qzeros"].tolist() == [[signed(0x6A98E70F)]]
    assert tensors["scales"].dtype == torch.float16
    assert tensors["scales"].tolist() == [[0.5] * 8]
    assert tensors["g_idx"].dtype == torch.int32
    assert tensors["g_idx"].tolist() == [0] * 8
    second = pack_gptq(golden_weight(), -1, 4, version=2)
    assert second["qzeros"].tolist() == [[signed(0x7BA9F810)]]


@pytest.mark.parametrize(
    ("bits", "version", "word"),
    [(4, 1, 0x77777777), (4, 2, 0x88888888), (8, 1, 0x7F7F7F7F), (8, 2, 0x80808080)],
)
def test_gptq_zero_points_of_symmetric_weights(bits, version, word):
    tensors = pack_gptq(random_weight(16, 64, bits, 32, symmetric=True), 32, bits, version=version)
    assert set(tensors["qzeros"].flatten().tolist()) == {signed(word)}
    assert unpack_gptq(tensors, bits, version, 32)[0].zero_point is None


def test_awq_golden_words():
    """Nibbles of a word hold outputs 0 2 4 6 1 3 5 7, the lowest first; zero points as they are."""
    tensors = pack_awq(golden_weight(), -1)
    assert tensors["qweight"].shape == (8, 1)
    assert tensors["qweight"][0, 0].item() == signed(0x75316420)
    assert tensors["qweight"][5, 0].item() == signed(0x75316425)
    assert tensors["qzeros"].tolist() == [[signed(0x7AF1B980)]]
    symmetric = pack_awq(random_weight(16, 64, 4, 32, symmetric=True), 32)
    assert set(symmetric["qzeros"].flatten().tolist()) == {signed(0x88888888)}


def reference_gptq_words(q: Tensor, bits: int) -> Tensor:
    """AutoGPTQ's packing loop over [K, N], in Python's integers."""
    stored = (q.T.int() + (1 << (bits - 1))).tolist()
    count = 32 // bits
    words = []
    for start in range(0, len(stored), count):
        row = [0] * len(stored[0])
        for i in range(count):
            row = [w | (v << (bits * i)) for w, v in zip(row, stored[start + i], strict=True)]
        words.append([signed(word) for word in row])
    return torch.tensor(words, dtype=torch.int32)


def reference_awq_words(q: Tensor) -> Tensor:
    """AutoAWQ's packing loop over [K, N], in Python's integers."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    rows = []
    for row in (q.T.int() + 8).tolist():
        words = []
        for j in range(len(row) // 8):
            word = 0
            for i in range(8):
                word |= row[8 * j + order[i]] << (4 * i)
            words.append(signed(word))
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_the_original_loops(bits):
    weight = random_weight(24, 64, bits, 32, symmetric=False)
    found = pack_gptq(weight, 32, bits)["qweight"]
    assert torch.equal(found, reference_gptq_words(weight.q, bits))
    if bits == 4:
        assert torch.equal(pack_awq(weight, 32)["qweight"], reference_awq_words(weight.q))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("shape", "size"), [((8, 32), 32), ((40, 384), 128), ((16, 96), -1)])
def test_gptq_round_trip(bits, version, symmetric, shape, size):
    weight = random_weight(*shape, bits, size, symmetric=symmetric)
    tensors = pack_gptq(weight, size, bits, version=version)
    groups = weight.scale.shape[1]
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "qweight": (shape[1] * bits // 32, shape[0]),
        "qzeros": (groups, shape[0] * bits // 32),
        "scales": (groups, shape[0]),
        "g_idx": (shape[1],),
    }
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    found, order = unpack_gptq(tensors, bits, version, size)
    assert order is None
    require_equal(found, weight)
    assert torch.equal(dequantize_gptq(tensors, bits, version), values(weight, size))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("shape", "size"), [((8, 32), 32), ((40, 384), 128), ((16, 96), -1)])
def test_awq_round_trip(symmetric, shape, size):
    weight = random_weight(*shape, 4, size, symmetric=symmetric)
    tensors = pack_awq(weight, size)
    assert tensors["qweight"].shape == (shape[1], shape[0] // 8)
    assert tensors["qzeros"].shape == (weight.scale.shape[1], shape[0] // 8)
    require_equal(unpack_awq(tensors, size), weight)


@pytest.mark.parametrize("shape", [(128, 256), (200, 130), (64, 128)])
def test_fp8_block_round_trip(shape):
    q = torch.randn(shape, generator=GENERATOR).to(torch.float8_e4m3fn)
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    weight = StoredWeight(q, torch.rand(blocks, generator=GENERATOR) + 0.1)
    tensors = pack_fp8_block(weight)
    assert tensors["weight_scale_inv"].dtype == torch.float32
    found = unpack_fp8_block(tensors)
    assert torch.equal(found.q.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(found.scale, weight.scale)
    narrow = tensors | {"weight_scale_inv": weight.scale.bfloat16()}
    assert torch.equal(unpack_fp8_block(narrow).scale, weight.scale.bfloat16().float())


@pytest.mark.parametrize(("pack", "unpack"), SIGNED)
def test_scales_of_both_signs_become_positive_and_values_stay(pack, unpack):
    """All integers, the lowest included, whose negative has no place among them."""
    bits = 8 if pack is pack_gptq_8 else 4
    weight = random_weight(40, 128, bits, 32, symmetric=False)
    tensors = pack(weight)
    signs = torch.randint(0, 2, weight.scale.shape, generator=GENERATOR) * 2 - 1
    spread = (weight.scale * signs).repeat_interleave(32, dim=1)
    exact = (weight.q.float() - weight.zero_point.repeat_interleave(32, dim=1)) * spread
    tensors["scales"] = (tensors["scales"] * signs.T).half()
    found = unpack(tensors)
    assert (found.scale > 0).all()
    assert torch.equal(values(found, 32), exact)
    require_equal(unpack(pack(found)), found)
    refused("scales holds 0.0", unpack, tensors | {"scales": tensors["scales"] * 0})


def test_act_order_is_returned_with_its_order():
    weight = random_weight(16, 128, 4, 32, symmetric=False)
    order = torch.randperm(128, generator=GENERATOR)
    shuffled = torch.empty_like(weight.q)
    shuffled[:, order] = weight.q
    g_idx = torch.empty(128, dtype=torch.int32)
    g_idx[order] = torch.arange(128, dtype=torch.int32) // 32
    tensors = pack_gptq(StoredWeight(shuffled, weight.scale, weight.zero_point), 32, 4)
    tensors["g_idx"] = g_idx
    found, found_order = unpack_gptq(tensors, 4, 1, 32)
    assert found_order is not None
    exact = torch.empty(16, 128)
    exact[:, order] = values(weight, 32)
    assert torch.equal(dequantize_gptq(tensors, 4, 1), exact)
    assert torch.equal(values(found, 32), exact[:, found_order])
    tensors["g_idx"][0] = (tensors["g_idx"][0] + 1) % 4
    refused("groups of other sizes than 32", unpack_gptq, tensors, 4, 1, 32)
    dequantize_gptq(tensors, 4, 1)


def test_scales_beyond_fp16_are_refused_unless_their_group_is_zero():
    weight = random_weight(8, 64, 4, 32, symmetric=False)
    for scale in (2.0**-60, 1e5):
        weight.scale[3, 1] = scale
        refused("cannot be held in fp16", pack_gptq, weight, 32, 4)
    weight.q[3, 32:] = weight.zero_point[3, 1]
    tensors = pack_gptq(weight, 32, 4)
    assert tensors["scales"][1, 3].item() == 1.0
    assert (dequantize_gptq(tensors, 4, 1)[3, 32:] == 0).all()
    assert torch.equal(pack_awq(weight, 32)["scales"], tensors["scales"])


@pytest.mark.parametrize(("shape", "size"), [((12, 64), 32), ((8, 36), -1), ((8, 48), 32)])
def test_shapes_that_do_not_fill_words_or_groups_are_refused(shape, size):
    groups = 1 if size == -1 else -(-shape[1] // size)
    weight = StoredWeight(torch.ones(shape, dtype=torch.int8), torch.ones(shape[0], groups))
    for pack in (lambda: pack_gptq(weight, size, 4), lambda: pack_awq(weight, size)):
        refused("does not fill words of 8 values", pack)


@pytest.mark.parametrize(
    ("leaf", "change", "message"),
    [
        ("qzeros", lambda t: t[:, :1], r"qzeros is torch.int32 \(2, 1\); needed .* \(2, 2\)"),
        ("qweight", lambda t: t.long(), "qweight is torch.int64"),
        ("scales", lambda t: t * 0, "scales holds 0.0"),
        ("scales", lambda t: t[:1], "group|g_idx|qzeros"),
        ("g_idx", lambda t: t + 5, "g_idx names groups outside of 0 to 1"),
        ("g_idx", None, "g_idx is missing"),
    ],
)
def test_damaged_gptq_tensors_are_refused(leaf, change, message):
    tensors = pack_gptq(random_weight(16, 64, 4, 32, symmetric=False), 32, 4)
    if change is None:
        del tensors[leaf]
    else:
        tensors[leaf] = change(tensors[leaf])
    refused(message, unpack_gptq, tensors, 4, 1, 32)


def test_damaged_awq_and_fp8_tensors_are_refused():
    tensors = pack_awq(random_weight(16, 64, 4, 32, symmetric=False), 32)
    refused(r"qzeros .* needed is torch.int32 \(1, 2\)", unpack_awq, tensors, 64)
    refused("qweight is missing", unpack_awq, {}, 32)
    ones = torch.ones(128, 128).to(torch.float8_e4m3fn)
    block = pack_fp8_block(StoredWeight(ones, torch.ones(1, 1)))
    with pytest.raises(CheckpointError, match="weight is torch.int8"):
        unpack_fp8_block(block | {"weight": torch.ones(128, 128, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match="weight_scale_inv is torch.float32"):
        unpack_fp8_block(block | {"weight_scale_inv": torch.ones(2, 1)})


def test_configs_are_read_back():
    asymmetric = W4.model_copy(update={"symmetric": False})
    channel = WeightSpec(dtype="int8")
    for spec in (W4, asymmetric, channel):
        for version in (1, 2):
            config = gptq_config(spec, version=version, quantizer="ptq:0", unquantized=("lm_head",))
            assert "dynamic" not in config
            assert read_gptq_config(json.loads(json.dumps(config))) == (
                Scheme(weights=spec),
                version,
            )
    assert read_awq_config(awq_config(W4)) == (Scheme(weights=asymmetric), W4.group_size)
    assert read_fp8_config(fp8_block_config())[0] == PRESETS["fp8_block"]
    for scale_fmt in ("ue8m0", None):
        assert read_fp8_config(fp8_block_config() | {"scale_fmt": scale_fmt})[1].unpack is not None


def test_gptq_config_is_that_of_the_format():
    spec = WeightSpec(dtype="int4", granularity="group", group_size=128)
    config = gptq_config(spec, version=1, quantizer="ptq:0.1")
    expected = (
        '{"quant_method":"gptq","bits":4,"group_size":128,"sym":true,"desc_act":false,'
        '"checkpoint_format":"gptq","damp_percent":0.01,"true_sequential":true,"lm_head":false,'
        '"static_groups":false,"pack_dtype":"int32","meta":{"quantizer":["ptq:0.1"]}}'
    )
    assert config == json.loads(expected)
    left = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"]
    dynamic = gptq_config(spec, version=1, quantizer="", unquantized=left)["dynamic"]
    assert dynamic == {
        r"-:^model\.layers\.0\.self_attn\.(q_proj|qkv_proj)$": {},
        r"-:^model\.layers\.0\.mlp\.down_proj$": {},
    }


GPTQ = gptq_config(W4, version=1, quantizer="")


@pytest.mark.parametrize(
    ("read", "config", "change", "message"),
    [
        (read_gptq_config, GPTQ, {"bits": 3}, "bits 3; allowed: 4, 8"),
        (read_gptq_config, GPTQ, {"bits": True}, "bits True"),
        (read_gptq_config, GPTQ, {"group_size": 16}, "group_size 16; allowed: -1, 32, 64, 128"),
        (read_gptq_config, GPTQ, {"sym": None}, "sym absent; allowed: True, False"),
        (read_gptq_config, GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (read_gptq_config, GPTQ, {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        (read_gptq_config, GPTQ, {"lm_head": 8}, "lm_head 8"),
        (read_gptq_config, GPTQ, {"quant_method": "awq"}, "quant_method 'awq'"),
        (read_awq_config, awq_config(W4), {"bits": 8}, "bits 8; allowed: 4"),
        (read_awq_config, awq_config(W4), {"zero_point": False}, "zero_point False"),
        (read_awq_config, awq_config(W4), {"version": "gemv"}, "version 'gemv'"),
        (read_fp8_config, fp8_block_config(), {"activation_scheme": "static"}, "'static'"),
        (read_fp8_config, fp8_block_config(), {"weight_block_size": [128]}, r"size \[128\]"),
        (read_fp8_config, fp8_block_config(), {"scale_fmt": "float"}, "scale_fmt 'float'"),
    ],
)
def test_other_settings_are_refused(read, config, change, message):
    refused(message, read, config | change)


@pytest.mark.parametrize(
    ("refuse", "accepted"),
    [
        (refuse_gptq, {"w4", "w8", "w4c8", "w4s8", "w8s8"}),
        (refuse_awq, {"w4", "w4c8", "w4s8"}),
        (refuse_fp8_block, {"fp8_block"}),
        (refuse_paddle, {"w8", "a8w8", "a8w8c8", "fp8_tensor", "c8", "w8s8"}),
    ],
)
def test_schemes_that_a_target_cannot_express_are_refused(refuse, accepted):
    for name, scheme in PRESETS.items():
        if name in accepted:
            refuse(scheme)
        else:
            refused("^found .*; .* holds? ", refuse, scheme)
    if refuse is refuse_paddle:
        for granularity in ("per_channel", "per_token_head"):
            with pytest.raises(CheckpointError, match=f"found cache int8 {granularity}"):
                refuse(Scheme(kv_cache=KVCacheSpec(granularity=granularity)))


def test_paddle_tables_are_largest_magnitudes(tiny_llama, make_quantized):
    checkpoint = Checkpoint.open(make_quantized(tiny_llama))
    tables = json.loads(json.dumps(paddle_tables(checkpoint)))
    inputs, weights, cache = (tables[name] for name in FILES)
    name = "llama.layers.1.self_attn.q_proj"
    assert len(inputs) == len(weights) == 2 * 7
    assert inputs[f"{name}.activation_quanter"] == pytest.approx(0.05 * 127, rel=1e-6)
    scale = checkpoint.scale("model.layers.1.self_attn.q_proj.weight_scale").flatten()
    assert weights[f"{name}.weight_quanter"] == (scale.double() * 127).tolist()
    # 2 KV heads of 4 query heads: a reader takes every second entry
    table = cache["llama.layers.1.self_attn.cachek_matmul.activation_quanter"]
    k, v = checkpoint.kv_scales["model.layers.1.self_attn"]
    assert len(table) == 4
    assert table[::2] == table[1::2] == (k.double() * 127).tolist()
    table = cache["llama.layers.0.self_attn.cachev_matmul.activation_quanter"]
    assert table[::2] == (v.double() * 127).tolist()
    assert len(cache) == 2 * 2


def test_paddle_tables_of_fp8_hold_one_number_a_weight(tiny_llama, make_quantized):
    checkpoint = Checkpoint.open(make_quantized(tiny_llama, "fp8_tensor"))
    tables = paddle_tables(checkpoint)
    module = "model.layers.0.mlp.up_proj"
    found = tables["weight_scales.json"]["llama.layers.0.mlp.up_proj.weight_quanter"]
    assert found == checkpoint.scale(f"{module}.weight_scale").item() * 448
    assert tables["cachekv_scales.json"] == {}


def test_paddle_refuses_other_families_and_unequal_input_scales(
    make_model, make_quantized, monkeypatch
):
    with pytest.raises(CheckpointError, match="found model_type 'qwen3'"):
        paddle_tables(Checkpoint.open(make_quantized(make_model("qwen3"))))
    checkpoint = Checkpoint.open(make_quantized(make_model("qwen2")))
    assert any(name.startswith("qwen2.") for name in paddle_tables(checkpoint)["act_scales.json"])
    one = checkpoint.scale

    def scale(name: str) -> Tensor:
        return one(name) * (2 if "k_proj.input" in name else 1)

    monkeypatch.setattr(checkpoint, "scale", scale)
    refused("q_proj and .*k_proj differ", paddle_tables, checkpoint)
