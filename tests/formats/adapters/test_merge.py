"""A model with an adapter merged in is a model: made once, found again, of its base's files."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from formats.adapters import merge, read_lora
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from tests.adapters import write_adapter
from tests.conftest import write_quantized


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PTQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "merged"


@pytest.fixture
def adapter(tiny_llama, tmp_path) -> Path:
    return write_adapter(tmp_path / "adapter", tiny_llama)


def test_weights_are_the_base_s_with_what_the_adapter_adds(tiny_llama, adapter):
    folder = merge.merged_folder(tiny_llama, adapter)
    base, found = Checkpoint.open(tiny_llama), Checkpoint.open(folder, verify=True)
    lora = read_lora(adapter, base)
    assert found.names() == base.names()
    assert found.config == base.config
    assert {f.name for f in found.auxiliary_files} == {f.name for f in base.auxiliary_files}
    for name in base.names():
        weight, module = base.tensor(name), name.removesuffix(".weight")
        if module in lora.modules:
            own = lora.modules[module]
            weight = (weight.float() + own.b @ own.a).to(weight.dtype)
        assert torch.equal(found.tensor(name), weight)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters())


def test_it_is_made_once(tiny_llama, adapter, cache):
    folder = merge.merged_folder(tiny_llama, adapter)
    assert folder.parent == cache
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert merge.merged_folder(tiny_llama, adapter) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    os.utime(adapter / "adapter_model.safetensors", ns=(1, 1))  # another file, for all one can see
    assert merge.merged_folder(tiny_llama, adapter) != folder


def test_layers_that_are_stored_merged_are_written_so(make_model, tmp_path):
    base = make_model("phi3")
    adapter = write_adapter(tmp_path / "a", base, targets=("o_proj", "down_proj"))
    folder = merge.merged_folder(base, adapter)
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    wanted = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert found.keys() == wanted.keys()
    differ = {name.split(".")[-2] for name in wanted if not torch.equal(wanted[name], found[name])}
    assert differ == {"o_proj", "down_proj"}


def test_nothing_is_left_of_what_cannot_be(tiny_llama, adapter, cache, tmp_path):
    with pytest.raises(CheckpointError, match=r"found a8w8c8; .* --to float --adapter"):
        merge.merged_folder(write_quantized(tiny_llama, tmp_path / "q"), adapter)
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 5}))
    with pytest.raises(CheckpointError, match=r"adapter_config.json says 5"):
        merge.merged_folder(tiny_llama, adapter)
    assert not [path for path in cache.iterdir() if path.is_dir()]
