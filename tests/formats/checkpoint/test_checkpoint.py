"""What is written is what is read, by us and by others."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint.read import Checkpoint
from formats.checkpoint.write import CheckpointWriter
from formats.errors import CheckpointError
from formats.families.registry import uncounted_blocks
from formats.scale_table import ScaleEntry, ScaleTable
from formats.scheme import PRESETS, Scheme
from formats.stored.weights import StoredWeight
from kernels.numerics import TYPES, dequantize, expand_scale, fake_quantize_activations
from ptq.methods.rtn import RTNSpec
from tests.conftest import write_quantized
from tests.ptq.quantizing import edit_model
from tests.ptq.quantizing import quantized as run


def test_blocks_that_config_does_not_count_are_told_once(tiny_llama, tmp_path, caplog):
    """Layers that a family is known to predict further tokens with are none."""
    for name, count, warned in (("all", 2, 0), ("fewer", 1, 1)):
        model = edit_model(tiny_llama, tmp_path / name, num_hidden_layers=count)
        for _ in range(2):
            Checkpoint.open(model)
        assert len(caplog.messages) == warned
    assert (
        "num_hidden_layers of config.json is 1, and the files hold tensors of 1 more" in caplog.text
    )
    names = [f"model.layers.{i}.input_layernorm.weight" for i in range(5)] + ["mtp.fc.weight"]
    kinds = {"llama": 2, "glm4_moe": 0, "deepseek_v3": 0, "qwen3_next": 0}
    for kind, more in kinds.items():
        assert len(uncounted_blocks({"model_type": kind, "num_hidden_layers": 3}, names)) == more
    found = run(tmp_path / "fewer", tmp_path / "out", "w8", methods=(RTNSpec(),)).checkpoint
    assert not [n for n in Checkpoint.open(found).names() if n.startswith("model.layers.1.")]


@pytest.fixture
def model_for(tiny_llama, make_model):
    """A model whose layers a preset fits."""

    def model(preset: str) -> Path:
        weights = PRESETS[preset].weights
        if weights is None or not weights.super_blocks:
            return tiny_llama
        return make_model("llama", hidden_size=256, num_attention_heads=8)

    return model


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("shard_bytes", [2 << 30, 40_000])
def test_round_trip(model_for, tmp_path, preset, shard_bytes):
    model = model_for(preset)
    out = write_quantized(model, tmp_path / "out", preset, shard_bytes=shard_bytes)
    source, written = Checkpoint.open(model), Checkpoint.open(out, verify=True)
    assert written.scheme == PRESETS[preset]
    assert written.config == source.config
    expected = 14 if PRESETS[preset].weights else 0
    assert len(written.quantized_modules) == expected
    for name in source.names():
        module = name.removesuffix(".weight")
        if module in written.quantized_modules:
            spec, stored = written.scheme.weights, written.weight(module)
            weight = source.tensor(name).float()
            back = dequantize(stored.q, stored.scale, stored.zero_point, spec.block)
            step = expand_scale(stored.scale, weight.shape, spec.block)
            if spec.dtype == "fp8_e4m3":  # 3 bits of mantissa
                step = step.maximum(weight.abs() / 8)
            if spec.dtype == "fp4_e2m1":  # one bit
                step = step.maximum(weight.abs() / 2)
            most = 0.5001 if spec.dtype != "int4" else 0.53  # 7.5 and a rounded scale map to 7
            most = 1.0 if spec.two_level else most  # a sixteenth of the scale is cut, or a step
            assert ((back - weight).abs() <= step * most).all()
            if preset in ("nvfp4", "mxfp4", "mxfp8"):
                assert (back - weight).square().mean() < 0.02 * weight.square().mean()
            assert written.weight_shape(module) == tuple(weight.shape)
        else:
            assert torch.equal(written.tensor(name), source.tensor(name))
    cache = PRESETS[preset].kv_cache
    assert len(written.kv_scales) == (2 if cache and not cache.dynamic else 0)
    assert len(written.kv_offsets) == (2 if cache and cache.center_keys else 0)
    assert len(written.query_moments) == (2 if cache and cache.compensate_keys else 0)
    for k, v in written.kv_scales.values():
        assert k.shape == v.shape == (2,)
    shards = list(out.glob("*.safetensors"))
    assert (len(shards) > 3) == (shard_bytes == 40_000)
    assert not list(tmp_path.glob(".*"))
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("preset", sorted(name for name, own in PRESETS.items() if own.weights))
def test_weights_read_as_one_are_those_read_one_by_one(model_for, tmp_path, preset):
    out = write_quantized(model_for(preset), tmp_path / "out", preset, shard_bytes=40_000)
    checkpoint = Checkpoint.open(out)
    modules = [f"model.layers.{i}.self_attn.{leaf}_proj" for i in (1, 0) for leaf in "vkq"]
    files = {checkpoint._file(name).path for name in checkpoint.names() if modules[0] in name}
    files |= {checkpoint._file(name).path for name in checkpoint.names() if modules[-1] in name}
    assert len(files) > 1
    found, parts = checkpoint.weights(modules), [checkpoint.weight(module) for module in modules]
    assert torch.equal(found.scale, torch.cat([part.scale for part in parts]))
    wanted = torch.cat([part.q.view(torch.int8) for part in parts])
    assert torch.equal(found.q.view(torch.int8), wanted)
    assert found.q.dtype == parts[0].q.dtype


def test_tensors_of_several_types_become_one_that_holds_all(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    own = {"a": torch.tensor([[1.5]]), "b": torch.tensor([[2.0]], dtype=torch.bfloat16)}
    save_file(own | {"c": torch.zeros(0, 1)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.tensors(["b", "c", "a"]), torch.tensor([[2.0], [1.5]]))
    assert checkpoint.tensors(["b", "b"]).dtype == torch.bfloat16


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_files_have_the_mode_of_the_umask(tiny_llama, tmp_path, umask):
    before = os.umask(umask)
    try:
        out = write_quantized(tiny_llama, tmp_path / "out", shard_bytes=100_000)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()}
    assert len(modes) > 8
    assert set(modes.values()) == {0o666 & ~umask}, modes
    assert out.stat().st_mode & 0o777 == 0o777 & ~umask


def test_two_writes_have_the_same_bytes(tiny_llama, tmp_path):
    a, b = (write_quantized(tiny_llama, tmp_path / name) for name in "ab")
    files = sorted(path.relative_to(a) for path in a.rglob("*") if path.is_file())
    assert len(files) == 8
    assert all((a / path).read_bytes() == (b / path).read_bytes() for path in files)


def test_golden_bytes(tmp_path):
    """The layout of a layer on the disk, byte for byte."""
    with CheckpointWriter(
        tmp_path / "out", config={"model_type": "llama"}, scheme=PRESETS["a8w8_dynamic"]
    ) as writer:
        q = torch.tensor([[1, -2], [127, -127]], dtype=torch.int8)
        stored = StoredWeight(q, torch.tensor([[0.5], [0.25]]))
        writer.add_linear("m.q_proj", stored, torch.bfloat16)
        kind = {"dtype": "int8", "granularity": "per_channel", "statistic": "absmax"}
        seen = {"absmax": 63.5, "tokens": 0, "sqnr_db": None}
        row = ScaleEntry.of("m.q_proj.weight_scale", "weight", stored.scale, **kind, **seen)
        with pytest.raises(TypeError, match="clipped"):  # a name that there is not
            ScaleEntry.of("m.q_proj.weight_scale", "weight", stored.scale, **kind, clipped=0.5)
        writer.finish(ScaleTable(entries=(row,)))
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    header_size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_size])
    assert header == {
        "__metadata__": {"format": "pt"},
        "m.q_proj.weight_scale": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
        "m.q_proj.weight": {"dtype": "I8", "shape": [2, 2], "data_offsets": [8, 12]},
    }
    assert data[8 + header_size :] == b"\0\0\0\x3f\0\0\x80\x3e" + b"\x01\xfe\x7f\x81"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    integers = {"num_bits": 8, "type": "int", "symmetric": True}
    assert config["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "version": "0.17.0",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "int-quantized",
                "weights": integers | {"strategy": "channel", "dynamic": False},
                "input_activations": integers | {"strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }
    manifest = json.loads((tmp_path / "out" / "quant" / "manifest.json").read_text())
    entry = manifest["files"]["model.safetensors"]
    assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
OPENED = [(family, preset) for family in FAMILIES for preset in ("a8w8c8", "a8w8_dynamic", "w4")]
OPENED += [("llama", p) for p in ("w8", "a8w4", "fp8_tensor", "fp8_channel", "fp8_block")]
OPENED += [("llama", "a8w4_two_level")]


@pytest.mark.parametrize(("family", "preset"), OPENED)
def test_transformers_opens_it_as_the_same_function(make_model, make_quantized, family, preset):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    source = make_model(family)
    out = make_quantized(source, preset)
    written = Checkpoint.open(out)
    spec, activations = written.scheme.weights, written.scheme.activations
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name in written.quantized_modules:
        linear, stored = ours.get_submodule(name), written.weight(name)
        linear.weight.data = dequantize(stored.q, stored.scale, stored.zero_point, spec.block)
        static = f"{name}.input_scale" in written
        scale = written.tensor(f"{name}.input_scale")[0] if static else None

        def hook(module, inputs, scale=scale):
            kind = TYPES[activations.dtype]
            if scale is not None or activations.dtype == "fp8_e4m3":
                return (fake_quantize_activations(inputs[0], scale, kind, activations.group),)
            # Theirs: ours divides by 127.
            step = (inputs[0].abs().amax(-1, keepdim=True) / 127.5).clamp(min=1e-12)
            return ((inputs[0] / step).round().clamp(-128, 127) * step,)

        if activations is not None:
            linear.register_forward_pre_hook(hook)
    ids = torch.arange(40)[None] % 384
    with torch.no_grad():
        a, b = theirs(ids).logits, ours(ids).logits
    assert (a - b).norm() / b.norm() < 1e-4
    assert torch.equal(a.argmax(-1), b.argmax(-1))


def test_a_checkpoint_of_other_software(tiny_llama, make_quantized, tmp_path):
    """bf16 scales, no `quant` folder, keys that we do not write."""
    out = make_quantized(tiny_llama, "a8w8")
    tensors = load_file(out / "model.safetensors")
    scales = {n: t.bfloat16() if n.endswith("_scale") else t for n, t in tensors.items()}
    save_file(scales, tmp_path / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["weights"] |= {"observer": "minmax", "observer_kwargs": {}, "group_size": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    foreign = Checkpoint.open(tmp_path)
    assert foreign.scheme == PRESETS["a8w8"]
    assert foreign.scale_table is None
    assert foreign.scale("model.layers.0.mlp.up_proj.weight_scale").dtype == torch.float32


def test_a_float_checkpoint(tiny_llama):
    checkpoint = Checkpoint.open(tiny_llama)
    assert checkpoint.scheme == Scheme()
    assert checkpoint.scale_table is None
    assert checkpoint.shape("model.norm.weight") == (128,)
    assert checkpoint.dtype("model.norm.weight") == torch.bfloat16
    assert "model.norm.weight" in checkpoint
    assert "model.norm.bias" not in checkpoint


def test_a_scale_table_reads_as_pandas(make_quantized, tiny_llama):
    table = Checkpoint.open(make_quantized(tiny_llama)).scale_table
    frame = table.to_pandas()
    assert len(frame) == 14 + 14 + 4
    roles = {"input": 14, "k_cache": 2, "v_cache": 2, "weight": 14}
    assert frame.groupby("role").size().to_dict() == roles
    assert ScaleTable.from_json(table.to_json()) == table
    entry = table.get("model.layers.1.self_attn", "v_cache")
    assert entry.shape == (2,)
    assert table.get("model.layers.9.self_attn", "v_cache") is None


def write(out: Path, added: list[float]) -> None:
    with CheckpointWriter(out, config={}, scheme=Scheme()) as writer:
        for value in added:
            writer.add("x", torch.tensor([value]))


@pytest.mark.parametrize(
    ("added", "message"), [([1.0, 1.0], "twice"), ([torch.nan], "NaN"), ([1.0], "before finish")]
)
def test_the_writer_refuses_what_it_would_not_read(tmp_path, added, message):
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path / "out", added)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_stays_until_the_new_one_is_whole(tiny_llama, tmp_path):
    out = write_quantized(tiny_llama, tmp_path / "out", "a8w8")
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        write_quantized(tiny_llama, out, "c8")
    with (
        pytest.raises(CheckpointError, match="before finish"),
        CheckpointWriter(out, config={}, scheme=Scheme(), force=True) as writer,
    ):
        writer.add("x", torch.ones(1))
    assert (out / "model.safetensors").read_bytes() == before
    write_quantized(tiny_llama, out, "c8", force=True)
    assert Checkpoint.open(out, verify=True).scheme == PRESETS["c8"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
