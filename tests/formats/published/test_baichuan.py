"""Baichuan 1 and 2 of 7B are read as the Llama that they are."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from formats.checkpoint.read import Checkpoint
from inference.engine import Engine
from ptq.pipeline.driver import quantize_tokens
from tests.families import METHODS, but_one_in_ci, distance
from tests.ptq.quantizing import edit_model, make_plan, random_tokens
from tests.published import as_baichuan, check_published
from tests.refusals import refused_checkpoint as refused


@pytest.fixture(scope="module")
def native(make_model):
    return make_model("llama", num_key_value_heads=4, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def first(native, tmp_path_factory):
    return as_baichuan(native, tmp_path_factory.mktemp("baichuan") / "first")


def unit_head(tensors):
    """Divide the rows of the head by their length."""
    head = torch.nn.functional.normalize(tensors["lm_head.weight"].float())
    tensors["lm_head.weight"] = head.to(torch.bfloat16)


@pytest.mark.parametrize("preset", but_one_in_ci("a8w8c8", ["a8w8c8", "fp8_channel"]))
def test_the_first_is_a_llama(native, first, tmp_path, preset):
    written = check_published(first, native, tmp_path, preset)
    config = json.loads((written / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "auto_map" not in config


def test_the_second_has_a_head_of_unit_rows(native, tmp_path):
    second = as_baichuan(native, tmp_path / "second", z_loss_weight=0)
    native = edit_model(native, tmp_path / "native", unit_head)
    written = check_published(second, native, tmp_path / "out", "w4")
    head = load_file(written / "model.safetensors")["lm_head.weight"].float()
    assert head.norm(dim=1).sub(1).abs().max() < 0.01


def alibi_logits(native, ids):
    """transformers' Llama without rotation, its mask biased by ALiBi: logits [T, vocabulary]."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(native, **options).eval()
    still = torch.ones(1, len(ids), 32), torch.zeros(1, len(ids), 32)
    model.model.rotary_emb.forward = lambda *_, **__: still
    at = torch.arange(len(ids))
    distance = at - at[:, None]
    bias = 2.0 ** -torch.tensor([2.0, 4.0, 6.0, 8.0])[:, None, None] * distance
    with torch.no_grad():
        mask = bias.masked_fill(distance > 0, float("-inf"))[None]
        return model(ids[None], attention_mask=mask).logits[0]


def test_models_of_13b_have_biases_by_distance(native, first, tmp_path):
    folder = shutil.copytree(first, tmp_path / "large")
    config = json.loads((folder / "config.json").read_text())
    config["model_max_length"] = config.pop("max_position_embeddings")
    (folder / "config.json").write_text(json.dumps(config))
    ids = random_tokens().sequences()[1]
    wanted = alibi_logits(native, ids)
    assert distance(Engine.from_pretrained(folder).score(ids.tolist()), wanted) < 1e-4
    methods, bound = METHODS["a8w8c8"]
    plan = make_plan(folder, tmp_path / "out", methods=methods)
    written = quantize_tokens(plan, random_tokens(), progress=False).checkpoint
    assert distance(Engine.from_pretrained(written).score(ids.tolist()), wanted) < bound
    assert json.loads((written / "config.json").read_text())["model_type"] == "llama_alibi"


def test_rows_that_do_not_fit_the_heads_are_refused(first, tmp_path):
    name = "model.layers.1.self_attn.W_pack.weight"
    shorten = lambda tensors: tensors.update({name: tensors[name][:-1]})  # noqa: E731
    folder = edit_model(first, tmp_path / "short", shorten)
    refused(f"{name} has shape .383, 128.; config.json says 384", Checkpoint.open, folder)


def test_quantized_files_of_the_layout_are_refused(first, tmp_path):
    gptq = {"quant_method": "gptq", "bits": 4}
    folder = edit_model(first, tmp_path / "gptq", quantization_config=gptq)
    refused("'baichuan' are read in floating point alone", Checkpoint.open, folder)
