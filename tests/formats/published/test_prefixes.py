"""Files of a model that was saved without its head are read as those of the model with one."""

from __future__ import annotations

import shutil

from safetensors.torch import load_file, save_file

from formats.checkpoint.read import Checkpoint
from tests.families import check_engine
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
