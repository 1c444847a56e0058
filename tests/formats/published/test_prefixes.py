"""Files of a model that was saved without its head are read as those of the model with one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from inference.engine import Engine
from ptq.convert.convert import convert
from tests.families import check_engine, check_quantized
from tests.older_families import write_older
from tests.ptq.quantizing import random_tokens


def test_bloom_without_the_prefix_of_its_class(tmp_path):
    """As it was published: `h.0...`, `word_embeddings.weight`."""
    native = write_older(tmp_path / "native", "bloom")
    folder = shutil.copytree(native, tmp_path / "published")
    tensors = load_file(native / "model.safetensors")
    short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert "h.0.self_attention.dense.weight" in short
    save_file(short, folder / "model.safetensors", metadata={"format": "pt"})
    assert Checkpoint.open(folder).names() == Checkpoint.open(native).names()
    check_engine(folder, random_tokens(1, 40).ids[0].clamp(min=1))


def without_prefix(source: Path, out: Path) -> Path:
    """A folder whose names lack their `model.`."""
    shutil.copytree(source, out)
    (out / "quant/manifest.json").unlink(missing_ok=True)
    (out / "quant/scale_table.json").unlink(missing_ok=True)
    tensors = load_file(out / "model.safetensors")
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert not any(name.startswith("model.") for name in short)
    save_file(short, out / "model.safetensors", metadata={"format": "pt"})
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
