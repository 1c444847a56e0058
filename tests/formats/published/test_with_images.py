"""The text of a model of text and images, as transformers saves both."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from inference.engine import Engine
from ptq.methods.gptq import GPTQSpec
from ptq.methods.rtn import RTNSpec
from ptq.pipeline.driver import quantize_tokens
from tests.conftest import SIZES, write_tokenizer
from tests.fake_quantized import dequantized
from tests.families import check_quantized, check_rounding, distance
from tests.ptq.quantizing import make_plan, random_tokens
from tests.tiny_families import TINY

IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
IMAGES |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN_IMAGES = {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2}
QWEN_IMAGES |= {"patch_size": 4, "out_hidden_size": 128, "num_position_embeddings": 16}
QWEN = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    },
    "full_attention_interval": 2,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}  # with keys of what Qwen publishes that no class of transformers reads
GEMMA = TINY["gemma3_text"] | {"model_type": "gemma3_text"}
LFM2 = {"layer_types": ["conv", "full_attention"]}
QWEN_MOE = QWEN | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
QWEN_MOE |= {"shared_expert_intermediate_size": 128}


def write_both(folder: Path, model_type: str, text: dict[str, Any], vision: str | None) -> Any:
    """Save a tiny model of text and images, of that type or Qwen's, and return it."""
    images = QWEN_IMAGES if vision is None else IMAGES | {"model_type": vision}
    config = AutoConfig.for_model(model_type, text_config=SIZES | text, vision_config=images)
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
        ("gemma3", GEMMA, "siglip_vision_model"),
        ("mistral3", TINY["ministral3"] | {"model_type": "ministral3"}, "pixtral"),
        ("mistral3", {"model_type": "mistral", "sliding_window": None}, "pixtral"),
        ("qwen3_5", QWEN | {"model_type": "qwen3_5_text"}, None),
        ("lfm2_vl", LFM2 | {"model_type": "lfm2"}, "siglip2_vision_model"),
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
    model = write_both(tmp_path / "model", "gemma3", GEMMA, "siglip_vision_model")
    whole = Engine.from_pretrained(tmp_path / "model").score(list(range(1, 40)))
    tensors = {name: tensor.contiguous() for name, tensor in model.model.state_dict().items()}
    assert "language_model.layers.0.mlp.up_proj.weight" in tensors
    save_file(tensors, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    assert torch.equal(Engine.from_pretrained(tmp_path / "model").score(list(range(1, 40))), whole)


def test_what_is_written_is_a_model_of_text(tmp_path):
    write_both(tmp_path / "model", "gemma3", GEMMA, "siglip_vision_model")
    written = check_quantized(tmp_path / "model", tmp_path / "out", "w4")
    assert written.config["architectures"] == ["Gemma3ForCausalLM"]
    assert "text_config" not in json.loads((written.path / "config.json").read_text())


def publish_qwen(folder: Path) -> dict[str, torch.Tensor]:
    """Make of a folder what Qwen publishes; the tensors of its layer for further tokens.

    The experts of a block are one parameter, those of that layer too, or one by one.
    """
    tensors = load_file(folder / "model.safetensors")
    names = ("fc", "norm", "pre_fc_norm_hidden", "layers.1.mlp.experts.0.up_proj")
    further = {f"mtp.{name}.weight": torch.randn(8, 128).bfloat16() for name in names}
    further["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.randn(4, 8, 128).bfloat16()
    for i in range(2):
        experts = f"model.language_model.layers.{i}.mlp.experts"
        parts = {
            leaf: [tensors.pop(f"{experts}.{e}.{leaf}_proj.weight") for e in range(4)]
            for leaf in ("gate", "up", "down")
        }
        both = zip(parts["gate"], parts["up"], strict=True)
        tensors[f"{experts}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in both])
        tensors[f"{experts}.down_proj"] = torch.stack(parts["down"])
    save_file(tensors | further, folder / "model.safetensors", metadata={"format": "pt"})
    return further


@pytest.mark.parametrize("preset", ["w4", "a8w8c8"])
def test_qwen_as_it_is_published(tmp_path, preset):
    text = QWEN_MOE | {"model_type": "qwen3_5_moe_text"}
    model, ids = write_both(tmp_path / "model", "qwen3_5_moe", text, None), random_tokens().ids[0]
    with torch.no_grad():
        wanted = model(input_ids=ids[None]).logits[0]
    further = publish_qwen(tmp_path / "model")
    engine = Engine.from_pretrained(tmp_path / "model")
    assert distance(engine.score(ids.tolist()), wanted) < 1e-4
    methods = (GPTQSpec(),) if preset == "w4" else (RTNSpec(),)
    plan = make_plan(tmp_path / "model", tmp_path / "out", preset, methods=methods)
    path = quantize_tokens(plan, random_tokens(), progress=False).checkpoint
    written = Checkpoint.open(path, verify=True)
    assert written.config["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert "model.layers.1.mlp.experts.3.up_proj" in written.quantized_modules
    assert written.predicting_layers == ("mtp",)
    both = further.pop("mtp.layers.0.mlp.experts.gate_up_proj")  # written one by one
    further |= {f"mtp.layers.0.mlp.experts.{i}.up_proj.weight": x[4:] for i, x in enumerate(both)}
    rounded = {f"{name}.weight" for name in written.quantized_modules} & further.keys()
    assert rounded == {name for name in further if "experts" in name}
    for name in further.keys() - rounded:
        assert torch.equal(written.tensor(name), further[name])
    for name in rounded:
        found, exact = dequantized(written, name.removesuffix(".weight")), further[name].float()
        assert distance(found, exact) < (0.2 if preset == "w4" else 0.01)
    check_rounding(written, ids, wanted, 1.0, near=0.5)


def test_what_gemma_leaves_out_is_what_its_class_has(tmp_path):
    from transformers import Gemma3TextConfig

    from formats.published import GEMMA3

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
