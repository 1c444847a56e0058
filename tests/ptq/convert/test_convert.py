"""The convert command on tiny models: every target and back, notes, refusals, interruptions."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.foreign.gptq import dequantize_gptq
from formats.stored.safetensors_files import INDEX, open_weights
from formats.stored.weights import StoredWeight
from ptq.commands import convert as command
from ptq.convert.convert import convert, describe
from tests.conftest import write_quantized
from tests.fake_quantized import dequantized
from tests.ptq.convert.conftest import SCHEMES
from tests.ptq.quantizing import edit_model
from tests.refusals import refused_checkpoint

CASES = [
    *((preset, target) for preset in ("w4", *SCHEMES) for target in ("gptq", "gptq_v2")),
    ("w8", "gptq"),
    ("w8", "gptq_v2"),
    *((preset, "awq") for preset in ("w4", "w4_g32", "w4_asym", "w4_channel")),
    ("fp8_block", "fp8_block"),
]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: file.tensor(name) for name, file in open_weights(folder).items()}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_bytes())


def require_weights(found: StoredWeight, wanted: StoredWeight) -> None:
    assert torch.equal(found.q.view(torch.uint8), wanted.q.view(torch.uint8))
    assert (found.zero_point is None) == (wanted.zero_point is None)
    if wanted.zero_point is not None and found.zero_point is not None:
        assert torch.equal(found.zero_point, wanted.zero_point)
    torch.testing.assert_close(found.scale, wanted.scale, rtol=2**-11, atol=0)


@pytest.mark.parametrize(("name", "target"), CASES)
def test_there_and_back(name, target, quantized, converted, tmp_path):
    source, out = Checkpoint.open(quantized(name)), converted(name, target)
    convert(out, tmp_path / "back", "compressed_tensors")
    back = Checkpoint.open(tmp_path / "back", verify=True)
    assert back.scheme == source.scheme
    assert back.quantized_modules == source.quantized_modules
    assert back.config == source.config
    for module in source.quantized_modules:
        require_weights(back.weight(module), source.weight(module))
        new, old = dequantized(back, module), dequantized(source, module)
        torch.testing.assert_close(new, old, rtol=2**-10, atol=0)
    for tensor in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(back.tensor(tensor), source.tensor(tensor))
    assert back.scale_table is not None
    assert {row.statistic for row in back.scale_table.entries} == {"imported"}


@pytest.mark.parametrize(("name", "target"), [("w4", "gptq"), ("w4", "awq"), CASES[-1]])
def test_the_folder_is_that_of_the_format(name, target, quantized, converted):
    source, out = quantized(name), converted(name, target)
    files = {path.name for path in out.iterdir()}
    assert {path.name for path in Checkpoint.open(source).auxiliary_files} <= files
    assert {"tokenizer.json", "config.json", "model.safetensors"} <= files
    assert not (out / "quant").exists()
    config = config_of(out)
    method = {"fp8_block": "fp8"}.get(target, target)
    assert config["quantization_config"]["quant_method"] == method
    assert config["model_type"] == "llama"
    assert ("quantize_config.json" in files) == (target == "gptq")
    leaves = {
        "gptq": {"qweight", "qzeros", "scales", "g_idx"},
        "awq": {"qweight", "qzeros", "scales"},
        "fp8_block": {"weight", "weight_scale_inv"},
    }[target]
    found = {n.rpartition(".")[2] for n in open_weights(out) if "_proj." in n}
    assert found == leaves
    assert not [n for n in open_weights(out) if n.endswith("weight_scale")]


def test_gptq_tensors_dequantize_to_the_source(quantized, converted):
    source, tensors = (
        Checkpoint.open(quantized("w4_asym")),
        tensors_of(converted("w4_asym", "gptq")),
    )
    for module in source.quantized_modules:
        layer = {
            leaf: tensors[f"{module}.{leaf}"] for leaf in ("qweight", "qzeros", "scales", "g_idx")
        }
        found = dequantize_gptq(layer, 4, 1)
        torch.testing.assert_close(found, dequantized(source, module), rtol=2**-10, atol=0)


@pytest.fixture(scope="module")
def partly(make_model, make_quantized, tmp_path_factory) -> Path:
    """A Qwen2 with biases, an untied head, and two layers that were left alone."""
    model = make_model("qwen2", tie_word_embeddings=False)
    left = ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj")

    def restore(tensors: dict[str, Tensor]) -> None:
        for module in left:
            for leaf in ("weight_packed", "weight_scale", "weight_shape"):
                del tensors[f"{module}.{leaf}"]
            tensors[f"{module}.weight"] = Checkpoint.open(model).tensor(f"{module}.weight")

    out = tmp_path_factory.mktemp("partly") / "source"
    edit_model(make_quantized(model, "w4"), out, restore)
    shutil.rmtree(out / "quant")
    config = config_of(out)
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*layers.0.mlp.(down|up)_proj$"]
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("target", ["gptq", "awq"])
def test_biases_and_unquantized_layers_are_kept(target, partly, tmp_path):
    convert(partly, tmp_path / "out", target)
    found, before = tensors_of(tmp_path / "out"), tensors_of(partly)
    plain = [name for name in before if name.endswith((".bias", "norm.weight", "up_proj.weight"))]
    assert "model.layers.1.self_attn.q_proj.bias" in plain
    for name in (*plain, "lm_head.weight"):
        assert torch.equal(found[name], before[name])
    quantization = config_of(tmp_path / "out")["quantization_config"]
    if target == "awq":
        assert quantization["modules_to_not_convert"] == [
            "lm_head",
            "model.layers.0.mlp.down_proj",
            "model.layers.0.mlp.up_proj",
        ]
    else:
        assert len(quantization["dynamic"]) == 2
    convert(tmp_path / "out", tmp_path / "back", "compressed_tensors")
    back, source = Checkpoint.open(tmp_path / "back"), Checkpoint.open(partly)
    assert back.quantized_modules == source.quantized_modules
    assert back.names() == source.names()


def test_large_models_are_sharded(quantized, tmp_path):
    source = quantized("w4")
    convert(source, tmp_path / "one", "gptq")
    convert(source, tmp_path / "many", "gptq", shard_bytes=60_000)
    index = json.loads((tmp_path / "many" / INDEX).read_bytes())
    one, many = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    assert len(set(index["weight_map"].values())) > 3
    done = convert(tmp_path / "many", tmp_path / "back", "compressed_tensors", shard_bytes=60_000)
    assert done.modules == 14
    Checkpoint.open(tmp_path / "back", verify=True)


def test_rounded_scales_and_a_lost_cache_are_told(quantized, tiny_llama, tmp_path, capsys):
    assert command.main([str(quantized("w4")), str(tmp_path / "exact"), "--to", "gptq"]) == 0
    out = capsys.readouterr().out
    assert "14 quantized layers, integers equal to the source's bit for bit; scales exact" in out
    assert "cache" not in out

    def fine_scales(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[name] = tensors[name].float() * (1 + 2**-12)

    source = edit_model(quantized("w4"), tmp_path / "fine", fine_scales)
    shutil.rmtree(source / "quant")
    done = convert(source, tmp_path / "rounded", "gptq")
    assert 2**-13 < done.scale_rounding <= 2**-11
    assert f"scales rounded to fp16, by at most {done.scale_rounding:.2g}" in "\n".join(
        describe(done, tmp_path, "gptq")
    )
    source = write_quantized(tiny_llama, tmp_path / "w4c8", "w4c8")
    for target in ("gptq", "awq"):
        notes = convert(source, tmp_path / f"c8_{target}", target).notes
        assert f"(int8 per_head) and its scales are not part of the {target} format" in notes[0]
        assert not (tmp_path / f"c8_{target}" / "quant").exists()


def test_readers_that_refuse_asymmetric_gptq_are_named(quantized, tmp_path):
    notes = convert(quantized("w4_asym"), tmp_path / "out", "gptq").notes
    assert "vLLM refuses" in notes[0]
    assert convert(quantized("w4_asym"), tmp_path / "awq", "awq").notes == ()


def test_paddle_tables_are_written(tiny_llama, make_quantized, tmp_path, capsys):
    source = make_quantized(tiny_llama)
    assert command.main([str(source), str(tmp_path / "out"), "--to", "paddle"]) == 0
    out = capsys.readouterr().out
    assert "tables of scales only" in out
    assert "integers" not in out
    names = {"act_scales.json", "weight_scales.json", "cachekv_scales.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    table = json.loads((tmp_path / "out" / "cachekv_scales.json").read_bytes())
    assert len(table) == 4


@pytest.mark.parametrize(
    ("preset", "target", "message"),
    [
        ("a8w8c8", "gptq", "found static int8 inputs per_tensor; GPTQ holds weight-only schemes"),
        ("a8w4", "awq", "found dynamic int8 inputs per_token; AWQ holds weight-only schemes"),
        ("w8", "awq", "found int8 weights per_channel; AWQ holds int4 weights"),
        ("fp8_channel", "gptq_v2", "found fp8_e4m3 weights per_channel; GPTQ holds int4 and int8"),
        ("fp8_channel", "fp8_block", "fp8_block holds fp8 weights in blocks of 128 x 128"),
        ("w4", "paddle", "found int4 weights group of 128; Paddle's tables hold int8"),
        ("c8", "gptq", "found no quantized weights"),
        ("w4", "compressed_tensors", "is not converted to compressed_tensors"),
    ],
)
def test_what_a_target_cannot_express_is_refused(preset, target, message, quantized, tmp_path):
    source = quantized(preset)
    refused_checkpoint(message, convert, source, tmp_path / "out", target)
    assert list(tmp_path.iterdir()) == []


def test_float_models_and_other_sources_are_refused(tiny_llama, converted, tmp_path):
    with pytest.raises(CheckpointError, match="no quantized weights.* a recipe such as w4_gptq"):
        convert(tiny_llama, tmp_path / "out", "gptq")
    with pytest.raises(CheckpointError, match="has no quantized weights and is not converted"):
        convert(tiny_llama, tmp_path / "out", "compressed_tensors")
    with pytest.raises(CheckpointError, match="has the layout gptq and is not converted to awq"):
        convert(converted("w4", "gptq"), tmp_path / "out", "awq")
    refused_checkpoint("no such folder", convert, tmp_path / "nothing", tmp_path / "out", "gptq")
    shutil.copytree(converted("w4", "gptq"), tmp_path / "hqq")
    config = config_of(tmp_path / "hqq")
    config["quantization_config"]["quant_method"] = "hqq"
    (tmp_path / "hqq" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quant_method 'hqq'; allowed: 'gptq'"):
        convert(tmp_path / "hqq", tmp_path / "out", "compressed_tensors")


def test_existing_folders_need_force_and_the_source_is_safe(quantized, tmp_path):
    source = shutil.copytree(quantized("w4"), tmp_path / "source")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    arguments = [str(source), str(out), "--to", "gptq"]
    for force in ([], ["--force"]):
        message = r"holds no model that --force could replace \(found mine.txt\)"
        refused_checkpoint(message, command.main, [*arguments, *force])
    (out / "config.json").write_text("{}")
    refused_checkpoint("exists already. Remove it", command.main, arguments)
    assert (out / "mine.txt").exists()
    assert command.main([*arguments, "--force"]) == 0
    assert not (out / "mine.txt").exists()
    for target in (source, tmp_path):
        with pytest.raises(CheckpointError, match="choose another output path"):
            convert(source, target, "gptq", force=True)
    Checkpoint.open(source, verify=True)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[f"{Q}.g_idx"].copy_(t[f"{Q}.g_idx"].flip(0)), f"{Q}: g_idx is not sorted"),
        (lambda t: t.pop(f"{Q}.scales"), f"{Q}.scales is missing"),
        (lambda t: t.pop(f"{Q}.qweight"), f"{Q}.g_idx is not expected"),
        (lambda t: t.update({f"{Q}.perm": torch.ones(1)}), f"{Q}.perm is not expected"),
        (lambda t: t[f"{Q}.qzeros"].add_(1), f"{Q}.qzeros has other zero points .* 0x77777777"),
        (lambda t: t[f"{Q}.scales"].fill_(0), f"{Q}: scales holds 0.0"),
    ],
)
def test_damaged_and_act_order_folders_are_refused(change, message, converted, tmp_path):
    source = edit_model(converted("w4_g32", "gptq"), tmp_path / "damaged", change)
    refused_checkpoint(message, convert, source, tmp_path / "out", "compressed_tensors")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_version_1_words_under_a_version_2_name_are_refused(converted, tmp_path):
    source = shutil.copytree(converted("w4", "gptq"), tmp_path / "source")
    config = config_of(source)
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is 0x88888888 in every word"):
        convert(source, tmp_path / "out", "compressed_tensors")


def test_a_difference_found_when_reading_back_leaves_nothing(quantized, tmp_path, monkeypatch):
    from formats.stored import shards

    written = shards.ShardWriter.add

    def flip(self, name: str, tensor: Tensor) -> None:
        written(self, name, tensor ^ 16 if name == f"{Q}.qweight" else tensor)

    monkeypatch.setattr(shards.ShardWriter, "add", flip)
    with pytest.raises(CheckpointError, match=f"{Q}: weight was read back with other bits"):
        convert(quantized("w4"), tmp_path / "out", "gptq")
    assert list(tmp_path.iterdir()) == []


def test_the_converted_folder_takes_no_copies_of_old_settings(converted, tmp_path):
    source = converted("w4", "gptq")
    assert (source / "quantize_config.json").is_file()
    convert(source, tmp_path / "back", "compressed_tensors")
    assert not (tmp_path / "back" / "quantize_config.json").exists()


def test_an_all_zero_channel_survives(make_model, tiny_llama, tmp_path):
    model = edit_model(tiny_llama, tmp_path / "model", lambda t: t[f"{Q}.weight"][3].zero_())
    source = write_quantized(model, tmp_path / "source", "w4")
    assert convert(source, tmp_path / "out", "gptq").scale_rounding < 2**-10
    convert(tmp_path / "out", tmp_path / "back", "compressed_tensors")
    assert (dequantized(Checkpoint.open(tmp_path / "back"), Q)[3] == 0).all()


def test_awq_words_are_read_alike_by_compressed_tensors(converted, tmp_path):
    name = "compressed_tensors.entrypoints.convert.converters.autoawq"
    converter = pytest.importorskip(name).AutoAWQConverter(group_size=32)
    source = converted("w4_asym", "awq")
    theirs = converter.process(tensors_of(source))
    convert(source, tmp_path / "back", "compressed_tensors")
    ours = tensors_of(tmp_path / "back")
    assert ours.keys() == theirs.keys()
    for tensor in ours:
        assert torch.equal(ours[tensor], theirs[tensor]), tensor


def test_fp8_blocks_are_read_alike_by_transformers(quantized, converted):
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    source = Checkpoint.open(quantized("fp8_block"))
    model = AutoModelForCausalLM.from_pretrained(
        converted("fp8_block", "fp8_block"),
        dtype=torch.bfloat16,
        quantization_config=FineGrainedFP8Config(dequantize=True),
    )
    for module in source.quantized_modules:
        found = model.get_submodule(module).weight
        wanted = dequantized(source, module)
        torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=0)


@pytest.mark.parametrize("target", ["gptq", "awq"])
def test_gptqmodel_runs_the_folder(target, quantized, converted):
    pytest.importorskip("gptqmodel")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(converted("w4", target), dtype=torch.bfloat16)
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()
