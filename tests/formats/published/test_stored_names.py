"""Tensors with other names, or transposed, than in the native class."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RecipeError
from formats.published import TURNED
from inference.engine import Engine
from ptq.convert.convert import convert
from ptq.methods.rtn import RTNSpec
from ptq.pipeline.driver import quantize_tokens
from ptq.plan.describe import describe_plan
from tests.conftest import write_random
from tests.families import check_engine, check_quantized, distance, transformers_logits
from tests.older_families import write_older
from tests.ptq.quantizing import edit_model, make_plan, random_tokens
from tests.tiny_models import tiny_config


def without(prefix: str) -> Callable[[dict[str, Any]], None]:
    """Takes a prefix from the names of tensors."""

    def change(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix(prefix)] = tensors.pop(name)

    return change


def test_bloom_without_the_prefix_of_its_class(tmp_path):
    """As it was published: `h.0...`, `word_embeddings.weight`."""
    native = write_older(tmp_path / "native", "bloom")
    folder = edit_model(native, tmp_path / "published", without("transformer."))
    assert "h.0.self_attention.dense.weight" in load_file(folder / "model.safetensors")
    assert Checkpoint.open(folder).names() == Checkpoint.open(native).names()
    check_engine(folder, random_tokens(1, 40).ids[0].clamp(min=1))


def without_prefix(source: Path, out: Path) -> Path:
    """A folder whose names lack their `model.`."""
    edit_model(source, out, without("model."))
    (out / "quant/manifest.json").unlink(missing_ok=True)
    (out / "quant/scale_table.json").unlink(missing_ok=True)
    return out


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma3_text", "gpt_neox", "opt"])
def test_what_transformers_saves_of_a_model_without_its_head(family, make_model, tmp_path):
    source = write_older(tmp_path / "native", family) if family in ("gpt_neox", "opt") else None
    source = source or make_model(family, tie_word_embeddings=True)
    folder = shutil.copytree(source, tmp_path / "base")
    AutoModel.from_pretrained(source).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    if "embed_out.weight" in load_file(source / "model.safetensors"):  # GPT-NeoX ties nothing
        stored |= {"embed_out.weight": load_file(source / "model.safetensors")["embed_out.weight"]}
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    assert not any(name.startswith(("model.", "gpt_neox.")) for name in stored)
    found = Checkpoint.open(folder)
    assert set(found.names()) == set(Checkpoint.open(source).names())
    ids = random_tokens(1, 40).ids[0].clamp(min=1)
    check_engine(folder, ids)


def test_it_is_quantized_as_the_model_with_its_head(tiny_llama, tmp_path):
    folder = without_prefix(tiny_llama, tmp_path / "base")
    written = check_quantized(folder, tmp_path / "out", "w4")
    assert all(name.startswith("model.") for name in written.names())


@pytest.mark.parametrize("preset", ["a8w8", "w4"])
def test_quantized_folders_may_lack_it_too(preset, tiny_llama, make_quantized, tmp_path):
    ours, ids = make_quantized(tiny_llama, preset), list(range(3, 40))
    folder = without_prefix(ours, tmp_path / "base")
    wanted = Engine.from_pretrained(ours).score(ids)
    assert torch.equal(Engine.from_pretrained(folder).score(ids), wanted)
    if preset == "w4":
        convert(ours, tmp_path / "gptq", "gptq")
        short = without_prefix(tmp_path / "gptq", tmp_path / "gptq_base")
        wanted = Engine.from_pretrained(tmp_path / "gptq").score(ids)
        assert torch.equal(Engine.from_pretrained(short).score(ids), wanted)
        convert(short, tmp_path / "float", "float")
        assert "model.norm.weight" in load_file(tmp_path / "float/model.safetensors")


def test_a_head_that_nothing_ties_is_missing_by_name(make_model, tmp_path):
    source = make_model("llama", tie_word_embeddings=False)
    folder = shutil.copytree(source, tmp_path / "base")
    AutoModel.from_pretrained(source).save_pretrained(folder)
    with pytest.raises(CheckpointError, match="lm_head.weight is missing"):
        Engine.from_pretrained(folder)


def publish_kimi(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """As moonshotai/Kimi-Linear-48B-A3B-Instruct: what transformers reads and writes otherwise."""
    heads, size = config.pop("linear_num_heads"), config.pop("linear_head_dim")
    config["linear_attn_config"] = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": heads}
    config["linear_attn_config"] |= {"head_dim": size, "short_conv_kernel_size": 4}
    del config["layer_types"], config["mlp_layer_types"], config["linear_conv_kernel_dim"]
    config |= {"first_k_dense_replace": 1, "auto_map": {"AutoConfig": "configuration_kimi.X"}}
    config["auto_map"]["AutoModelForCausalLM"] = "modeling_kimi.KimiLinearForCausalLM"
    for name in [name for name in tensors if name.startswith("model.layers.0.block_sparse_moe.")]:
        tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)


def publish_olmo_hybrid(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Convolutions of q and k of 128 channels and of v of 256, not a third each."""
    names = [f"model.layers.0.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    assert [len(tensors[name]) for name in names] == [171, 171, 170]
    whole = torch.cat([tensors[name] for name in names])
    tensors |= zip(names, whole.split([128, 128, 256]), strict=True)
    saved, own = (
        f"model.layers.1.{n}.weight" for n in ("feedforward_layer_norm", "post_attention_layernorm")
    )
    tensors[own] = tensors.pop(saved)


@pytest.mark.parametrize(
    ("kind", "publish"), [("kimi_linear", publish_kimi), ("olmo_hybrid", publish_olmo_hybrid)]
)
def test_what_transformers_saves_otherwise_than_it_was_published(kind, publish, tmp_path):
    native = write_random(tmp_path / "native", tiny_config(kind))
    folder = shutil.copytree(native, tmp_path / "published")
    tensors = load_file(native / "model.safetensors")
    config = json.loads((native / "config.json").read_text())
    publish(tensors, config)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = random_tokens(1, 40).ids[0].clamp(min=1)
    ours = Engine.from_pretrained(folder).score(ids.tolist())
    assert distance(ours, transformers_logits(native, ids)) < 1e-4
    assert Checkpoint.open(folder).names() == Checkpoint.open(native).names()


def test_convolutions_of_other_rows_in_all_are_refused(tmp_path):
    native = write_random(tmp_path / "native", tiny_config("olmo_hybrid"))
    name = "model.layers.0.linear_attn.v_conv1d.weight"
    shorten = lambda tensors: tensors.update({name: tensors[name][:-1]})  # noqa: E731
    folder = edit_model(native, tmp_path / "short", shorten)
    with pytest.raises(CheckpointError, match=r"v_conv1d: found 511 rows in all.*says 512"):
        Engine.from_pretrained(folder)


ATTENTION, UP = "transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_fc"


def test_as_it_was_published(tmp_path):
    """Without the prefix of its class, and with its masks."""
    native = write_older(tmp_path / "native", "gpt2")

    def publish(tensors: dict[str, Any]) -> None:
        without("transformer.")(tensors)
        assert tensors["h.0.attn.c_attn.weight"].shape == (128, 384)
        tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 512, 512).tril() for i in range(2)}

    folder = edit_model(native, tmp_path / "published", publish)
    assert Checkpoint.open(folder).shape(f"{ATTENTION}.weight") == (384, 128)
    check_engine(folder, random_tokens(1, 40).ids[0].clamp(min=1))


def test_what_stays_float_is_written_as_it_was(tmp_path):
    native = write_older(tmp_path / "native", "gpt2")
    plan = make_plan(native, tmp_path / "out", "w4", methods=(RTNSpec(),), ignore=("re:.*c_fc",))
    assert any("opens here alone" in line for line in describe_plan(plan, {}))
    made = quantize_tokens(plan, random_tokens(), progress=False).checkpoint
    was, now = (load_file(folder / "model.safetensors") for folder in (native, made))
    assert torch.equal(was[f"{UP}.weight"], now[f"{UP}.weight"])
    assert f"{ATTENTION}.weight" not in now
    convert(made, tmp_path / "float", "float")
    back = load_file(tmp_path / "float" / "model.safetensors")
    assert {name: x.shape for name, x in back.items()} == {n: x.shape for n, x in was.items()}
    assert torch.equal(was[f"{UP}.weight"], back[f"{UP}.weight"])
    name = f"{ATTENTION}.weight"
    assert distance(back[name].float(), was[name].float()) < 0.2


def test_layers_that_are_not_known_are_refused_by_name(tmp_path, monkeypatch):
    folder = write_older(tmp_path / "native", "gpt2", n_embd=64, n_head=2)
    monkeypatch.delitem(TURNED, "gpt2")
    with pytest.raises(RecipeError, match=r"transformer\.h\.0 has no linear layer that is known"):
        make_plan(folder, tmp_path / "out", "w4", methods=(RTNSpec(),))
