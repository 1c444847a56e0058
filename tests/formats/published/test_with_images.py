"""The text of a model of text and images, as transformers saves both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from inference.engine import Engine
from tests.conftest import write_tokenizer
from tests.families import check_quantized, distance
from tests.ptq.quantizing import random_tokens
from tests.tiny_families import TINY

IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
IMAGES |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
TEXT = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_both(folder: Path, model_type: str, text: dict[str, Any], vision: str) -> Any:
    """Save a tiny model of text and images, and return it."""
    config = AutoConfig.for_model(
        model_type, text_config=TEXT | text, vision_config=IMAGES | {"model_type": vision}
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


@pytest.mark.parametrize(
    ("model_type", "text", "vision"),
    [
        ("gemma3", TINY["gemma3_text"] | {"model_type": "gemma3_text"}, "siglip_vision_model"),
        ("mistral3", TINY["ministral3"] | {"model_type": "ministral3"}, "pixtral"),
        ("mistral3", {"model_type": "mistral", "sliding_window": None}, "pixtral"),
    ],
)
def test_the_text_is_read_alone(tmp_path, model_type, text, vision):
    folder = tmp_path / "model"
    model = write_both(folder, model_type, text, vision)
    ids = random_tokens(1, 60).ids[0].clamp(min=1)
    with torch.no_grad():
        wanted = model(input_ids=ids[None]).logits[0]
    assert distance(Engine.from_pretrained(folder).score(ids.tolist()), wanted) < 1e-4
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config["model_type"] == text["model_type"]
    assert all(name.startswith(("model.", "lm_head.")) for name in checkpoint.names())


def test_a_model_of_images_without_its_head(tmp_path):
    """By the names of its class in memory: `language_model.layers.0`."""
    text = TINY["gemma3_text"] | {"model_type": "gemma3_text"}
    model = write_both(tmp_path / "model", "gemma3", text, "siglip_vision_model")
    whole = Engine.from_pretrained(tmp_path / "model").score(list(range(1, 40)))
    tensors = {name: tensor.contiguous() for name, tensor in model.model.state_dict().items()}
    assert "language_model.layers.0.mlp.up_proj.weight" in tensors
    save_file(tensors, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    assert torch.equal(Engine.from_pretrained(tmp_path / "model").score(list(range(1, 40))), whole)


def test_what_is_written_is_a_model_of_text(tmp_path):
    text = TINY["gemma3_text"] | {"model_type": "gemma3_text"}
    write_both(tmp_path / "model", "gemma3", text, "siglip_vision_model")
    written = check_quantized(tmp_path / "model", tmp_path / "out", "w4")
    assert written.config["architectures"] == ["Gemma3ForCausalLM"]
    assert "text_config" not in json.loads((written.path / "config.json").read_text())


def test_what_gemma_leaves_out_is_what_its_class_has(tmp_path):
    from transformers import Gemma3TextConfig

    from formats.published.with_images import GEMMA3

    known = Gemma3TextConfig().to_dict()
    assert {key: known[key] for key in GEMMA3} == GEMMA3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, "text_config is missing"),
        ({"text_config": {"model_type": "vit"}}, "'vit' of text_config"),
    ],
)
def test_other_texts_are_refused_by_name(tmp_path, change, told):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3"} | change))
    with pytest.raises(CheckpointError, match=told):
        Checkpoint.open(tmp_path)
