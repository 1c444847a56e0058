"""Folders of other software run as they are, with the numbers of the converted checkpoint."""

import json
import re
import shlex

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.foreign.folder import ForeignFolder
from formats.scheme import PRESETS
from inference.engine import Engine
from ptq.cli import main
from ptq.convert.convert import convert
from tests.fake_quantized import dequantized
from tests.families import distance
from tests.kernels.triton_lab import interpreted
from tests.ptq.convert.foreign_folders import (
    AUTO_ROUND_CONFIG,
    GPTQ_CONFIG,
    IDS,
    INC_CONFIG,
    INT8_CONFIG,
    NF4_CONFIG,
    as_floats,
    auto_round_layer,
    few_bits_layer,
    inc_layer,
    int8_layer,
    logits,
    make_folder,
    nf4_layer,
    turn_inputs,
)
from tests.ptq.quantizing import edit_model
from tests.refusals import refused_checkpoint

Q = "model.layers.0.self_attn.q_proj"
CASES = [
    *(("w4_g32", target) for target in ("gptq", "gptq_v2", "awq")),
    *(("w4_asym", target) for target in ("gptq", "gptq_v2", "awq")),
    ("w4_channel", "awq"),
    ("w8", "gptq"),
    ("w8_asym_g64", "gptq_v2"),
    ("fp8_block", "fp8_block"),
]


def by_hand(tensors: dict[str, Tensor], module: str) -> Tensor:
    """s (q - z) of version 1 in fp32 [N, K], by shifts alone."""
    q, z, s = (tensors[f"{module}.{leaf}"] for leaf in ("qweight", "qzeros", "scales"))
    shifts = torch.arange(0, 32, 4)
    q = (q[:, None, :] >> shifts[:, None] & 15).flatten(0, 1)  # [K, N]
    z = ((z[:, :, None] >> shifts & 15).flatten(1) + 1) & 15  # [groups, N]
    group = torch.arange(len(q)) // (len(q) // len(z))
    return (s.float()[group] * (q - z[group]).float()).T


@pytest.mark.parametrize(("name", "target"), CASES)
def test_logits_are_those_of_the_converted_checkpoint(name, target, converted, tmp_path):
    folder = converted(name, target)
    convert(folder, tmp_path / "back", "compressed_tensors")
    direct, back = Checkpoint.open(folder), Checkpoint.open(tmp_path / "back")
    assert direct.scheme == back.scheme
    assert direct.names() == back.names()
    for tensor in direct.names():
        assert (direct.dtype(tensor), direct.shape(tensor)) == (
            back.dtype(tensor),
            back.shape(tensor),
        )
        assert torch.equal(direct.tensor(tensor), back.tensor(tensor)), tensor
    assert torch.equal(logits(folder), logits(tmp_path / "back"))


def test_g_idx_may_be_absent(converted, tmp_path):
    folder = converted("w4_asym", "gptq_v2")

    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]

    out = edit_model(folder, tmp_path / "plain", drop)
    assert torch.equal(logits(out), logits(folder))


def test_neural_compressors_folder_runs(tiny_llama, tmp_path):
    source = make_folder(tiny_llama, tmp_path / "source", inc_layer, INC_CONFIG)
    convert(source, tmp_path / "back", "compressed_tensors")
    assert torch.equal(logits(source), logits(tmp_path / "back"))


@pytest.mark.parametrize("config", [GPTQ_CONFIG, AUTO_ROUND_CONFIG])
def test_scales_of_both_signs(config, tiny_llama, tmp_path):
    """AutoRound's symmetric export: dequantized by hand it is ours, bit for bit."""
    source = make_folder(tiny_llama, tmp_path / "source", auto_round_layer, config)
    tensors = load_file(source / "model.safetensors")
    assert 0.3 < (tensors[f"{Q}.scales"] < 0).float().mean() < 0.7
    checkpoint = Checkpoint.open(source)
    assert checkpoint.scheme.wac == "w4_g32_asymmetric"
    assert len(checkpoint.quantized_modules) == 14
    for module in checkpoint.quantized_modules:
        assert torch.equal(dequantized(checkpoint, module), by_hand(tensors, module))
    done = convert(source, tmp_path / "back", "compressed_tensors")
    assert "Scales of both signs" in done.notes[-1]
    assert torch.equal(logits(source), logits(tmp_path / "back"))
    floats = as_floats(source, tmp_path / "float")
    assert torch.equal(floats.tensor(f"{Q}.weight"), by_hand(tensors, Q))


@pytest.mark.parametrize("name", ["w4_g32", "w4_asym"])
def test_act_order_runs(name, converted, tmp_path):
    source = turn_inputs(converted(name, "gptq"), tmp_path / "source")
    as_floats(source, tmp_path / "float")
    wanted = logits(tmp_path / "float")
    assert distance(logits(source), wanted) < 2e-4
    assert distance(logits(converted(name, "gptq")), wanted) > 0.1  # another model
    assert main(["inspect", str(source)]) == 0
    with pytest.raises(CheckpointError, match=f"g_idx is not sorted .* {source} FLOAT --to float"):
        convert(source, tmp_path / "out", "compressed_tensors")


def test_act_order_that_differs_among_layers_of_one_input_is_refused(converted, tmp_path):
    source = turn_inputs(converted("w4_g32", "gptq"), tmp_path / "source", alike=False)
    refused_checkpoint(f"ptq convert {source} FLOAT --to float", Engine.from_pretrained, source)


def test_act_order_runs_on_the_gpus_kernels(converted, tmp_path):
    compare_gpu(str(turn_inputs(converted("w4_g32", "gptq"), tmp_path / "source")))


@interpreted
def compare_gpu(source: str):
    from tests.inference.gpu.test_gpu import engine_of

    found, wanted = (engine_of(source, triton=triton).score(IDS[:8]) for triton in (True, False))
    assert distance(found, wanted) < 0.02


def test_experts_have_an_order_each(make_model, make_quantized, tmp_path):
    from tests.experts import MOE

    model = make_model("qwen3_moe", layers=1, **(MOE["qwen3_moe"] | {"mlp_only_layers": []}))
    convert(make_quantized(model, "w4"), tmp_path / "gptq", "gptq")
    source = turn_inputs(tmp_path / "gptq", tmp_path / "source")
    as_floats(source, tmp_path / "float")
    assert distance(logits(source), logits(tmp_path / "float")) < 2e-4


def test_layers_that_a_family_stores_as_one_are_taken_apart(make_model, tmp_path):
    phi3 = make_model("phi3")
    source = make_folder(phi3, tmp_path / "source", auto_round_layer, GPTQ_CONFIG)
    checkpoint = Checkpoint.open(source)
    tensors, attention = load_file(source / "model.safetensors"), Q.rpartition(".")[0]
    parts = [dequantized(checkpoint, f"{attention}.{part}_proj") for part in "qkv"]
    assert [len(part) for part in parts] == [128, 64, 64]
    assert torch.equal(torch.cat(parts), by_hand(tensors, f"{attention}.qkv_proj"))
    assert torch.isfinite(logits(source)).all()


def test_a_layer_is_read_when_it_is_asked_for(converted, monkeypatch):
    read, tensor = [], ForeignFolder.tensor

    def counted(self, name: str) -> Tensor:
        read.append(name)
        return tensor(self, name)

    monkeypatch.setattr(ForeignFolder, "tensor", counted)
    checkpoint = Checkpoint.open(converted("w4_asym", "gptq"))
    assert checkpoint.weight_shape(Q) == (128, 128)
    assert not [name for name in read if name.endswith("qweight")]
    checkpoint.weight(Q)
    assert [name for name in read if name.endswith("qweight")] == [f"{Q}.qweight"]


def test_commands_run_the_folder(converted, capsys):
    folder = str(converted("w4_g32", "awq"))
    assert main(["predict", folder, "--prompt", "def add", "--max-tokens", "3"]) == 0
    assert main(["inspect", folder, "--top", "2"]) == 0
    assert "scheme w4_g32" in capsys.readouterr().out
    assert main(["diff", folder, str(converted("w4_g32", "gptq"))]) == 0
    assert "no difference" in capsys.readouterr().out


@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 32), (4, 16), (8, 16), (3, 128)])
def test_bits_and_groups_that_do_not_run_become_a_float_model(
    bits, group_size, tiny_llama, tmp_path
):
    config = GPTQ_CONFIG | {"bits": bits, "group_size": group_size, "sym": False}
    layer = few_bits_layer(bits, group_size)
    source = make_folder(tiny_llama, tmp_path / "source", layer, config)
    refused_checkpoint(f"allowed: .*convert {source} FLOAT --to float", Checkpoint.open, source)
    found = as_floats(source, tmp_path / "float")
    weight = Checkpoint.open(tiny_llama).tensor(f"{Q}.weight").float()
    groups = weight.unflatten(1, (-1, group_size))
    step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / ((1 << bits) - 1)
    error = (found.tensor(f"{Q}.weight") - weight).unflatten(1, (-1, group_size)).abs()
    assert (error <= 1.1 * step + 1e-6).all()
    assert (error <= 0.51 * step).float().mean() > 0.9


@pytest.mark.parametrize(
    ("layer", "config"), [(int8_layer, INT8_CONFIG), (nf4_layer, NF4_CONFIG)], ids=["int8", "nf4"]
)
def test_the_refusal_of_bitsandbytes_has_the_command_that_helps(
    layer, config, tiny_llama, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    source = make_folder(tiny_llama, tmp_path / "source", layer, config)
    with pytest.raises(CheckpointError) as caught:
        Engine.from_pretrained(source)
    told = re.search(r"`ptq (convert [^`]*)`", str(caught.value))
    assert told is not None
    assert main(shlex.split(told[1])) == 0
    (made,) = [path for path in tmp_path.iterdir() if path != source]
    assert torch.isfinite(logits(made)).all()
    assert (Checkpoint.open(made).scheme == PRESETS["w8"]) == ("int8" in str(caught.value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"packing_format": "auto_round"},
            "allowed: 'auto_round:auto_gptq', 'auto_round:auto_awq'",
        ),
        ({"data_type": "mx_fp"}, "data_type 'mx_fp'; allowed: 'int', absent"),
        ({"act_bits": 8}, "act_bits 8; allowed: 16, absent"),
        ({"extra_config": {"lm_head": {"bits": 5}}}, "extra_config '.lm_head.': found bits 5"),
        ({"extra_config": {"lm_head": 8}}, "extra_config 'lm_head': 8; needed"),
        ({"bits": 5}, "bits 5; allowed: 4, 8"),
    ],
)
def test_other_settings_of_auto_round_are_refused(change, message, tiny_llama, tmp_path):
    config = AUTO_ROUND_CONFIG | change
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    weights = (tiny_llama / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    refused_checkpoint(message, Checkpoint.open, tmp_path)
