"""GPT-2's weights, which lie as [in, out], are read, quantized and written back."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from formats.published.known import TURNED
from ptq.convert.convert import convert
from ptq.methods.rtn import RTNSpec
from ptq.pipeline.driver import quantize_tokens
from ptq.plan.describe import describe_plan
from tests.families import check_engine, distance
from tests.older_families import write_older
from tests.ptq.quantizing import make_plan, random_tokens

ATTENTION, UP = "transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_fc"


def test_as_it_was_published(tmp_path):
    """Without the prefix of its class, and with its masks."""
    native = write_older(tmp_path / "native", "gpt2")
    folder = shutil.copytree(native, tmp_path / "published")
    tensors = load_file(native / "model.safetensors")
    short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert short["h.0.attn.c_attn.weight"].shape == (128, 384)
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 512, 512).tril() for i in range(2)}
    save_file(short | masks, folder / "model.safetensors", metadata={"format": "pt"})
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
