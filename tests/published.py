"""Files of published layouts, built from a tiny model of the native class by laying it otherwise."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from inference.config import EngineConfig
from inference.engine import Engine
from ptq.pipeline.driver import quantize_tokens
from tests.families import METHODS, distance, transformers_logits
from tests.ptq.quantizing import make_plan, random_tokens

SAME = (
    "hidden_size",
    "num_attention_heads",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
)


def as_baichuan(native: Path, out: Path, **settings: Any) -> Path:
    """A Llama's folder as Baichuan's of 7B; with z_loss_weight as Baichuan 2's."""

    def lay(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        for i in range(config["num_hidden_layers"]):
            attention = f"model.layers.{i}.self_attn"
            parts = [tensors.pop(f"{attention}.{part}_proj.weight") for part in "qkv"]
            tensors[f"{attention}.W_pack.weight"] = torch.cat(parts)
            tensors[f"{attention}.rotary_emb.inv_freq"] = torch.ones(config["head_dim"] // 2)
        return tensors

    keys = (*SAME, "num_hidden_layers", "vocab_size", "intermediate_size", "rms_norm_eps")
    keys += ("hidden_act", "max_position_embeddings")
    return _relay(native, out, lay, "baichuan", keys, settings)


def as_chatglm(native: Path, out: Path, **settings: Any) -> Path:
    """A Glm's folder as ChatGLM2's, ChatGLM3's and GLM-4-9B's."""

    def lay(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        laid = {
            "transformer.embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
            "transformer.encoder.final_layernorm.weight": tensors["model.norm.weight"],
            "transformer.output_layer.weight": tensors["lm_head.weight"],
            "transformer.rotary_pos_emb.inv_freq": torch.ones(config["head_dim"] // 4),
        }
        for i in range(config["num_hidden_layers"]):
            old, new = f"model.layers.{i}", f"transformer.encoder.layers.{i}"
            for leaf in ("weight", "bias"):
                parts = [tensors[f"{old}.self_attn.{part}_proj.{leaf}"] for part in "qkv"]
                laid[f"{new}.self_attention.query_key_value.{leaf}"] = torch.cat(parts)
            for ours, theirs in (
                ("input_layernorm", "input_layernorm"),
                ("post_attention_layernorm", "post_attention_layernorm"),
                ("self_attn.o_proj", "self_attention.dense"),
                ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
                ("mlp.down_proj", "mlp.dense_4h_to_h"),
            ):
                laid[f"{new}.{theirs}.weight"] = tensors[f"{old}.{ours}.weight"]
        return laid

    config = json.loads((native / "config.json").read_text())
    renamed = {
        "num_layers": config["num_hidden_layers"],
        "padded_vocab_size": config["vocab_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "kv_channels": config["head_dim"],
        "seq_length": config["max_position_embeddings"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "multi_query_attention": True,
        "multi_query_group_num": config["num_key_value_heads"],
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rmsnorm": True,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "original_rope": True,
    }
    return _relay(native, out, lay, "chatglm", SAME, renamed | settings)


def _relay(
    native: Path, out: Path, lay: Any, kind: str, keys: tuple[str, ...], settings: dict[str, Any]
) -> Path:
    """Copy a folder, its tensors laid otherwise and its config.json in other terms."""
    shutil.copytree(native, out)
    config = json.loads((native / "config.json").read_text())
    laid = lay(load_file(native / "model.safetensors"), config)
    save_file(
        {name: tensor.contiguous() for name, tensor in laid.items()}, out / "model.safetensors"
    )
    code = {"AutoConfig": f"configuration_{kind}.Config", "AutoModel": f"modeling_{kind}.Model"}
    own = {key: config[key] for key in keys if key in config}
    own |= {"model_type": kind, "auto_map": code, "torch_dtype": "bfloat16"} | settings
    (out / "config.json").write_text(json.dumps(own))
    return out


def check_tensors(found: Path, wanted: Path) -> None:
    """Both folders hold the same tensors, by the names that they are read by."""
    ours, theirs = Checkpoint.open(found), Checkpoint.open(wanted)
    assert ours.names() == theirs.names()
    for name in theirs.names():
        assert (ours.dtype(name), ours.shape(name)) == (theirs.dtype(name), theirs.shape(name))
        assert torch.equal(ours.tensor(name), theirs.tensor(name)), name


def check_published(published: Path, native: Path, out: Path, preset: str) -> Path:
    """It is the native model, by tensors and logits; what is quantized of it is a native checkpoint.

    Args:
        published: A folder in a published layout.
        native: The same model as transformers saved it.
        out: Where quantized checkpoints go.
        preset: How to quantize.

    Returns:
        The quantized checkpoint's folder.
    """
    check_tensors(published, native)
    ids = random_tokens().sequences()[1]
    wanted = transformers_logits(native, ids)
    sizes = EngineConfig(max_batched_tokens=16, max_batch_size=2, max_model_len=512)
    engine = Engine.from_pretrained(published, config=sizes)
    assert distance(engine.score(ids.tolist()), wanted) < 1e-4
    methods, bound = METHODS[preset]
    plan = make_plan(published, out, preset, methods=methods)
    path = quantize_tokens(plan, random_tokens(), progress=False).checkpoint
    theirs = transformers_logits(path, ids)
    ours = Engine.from_pretrained(path, config=sizes, quantized_kv=False).score(ids.tolist())
    assert distance(theirs, wanted) < bound
    assert distance(ours, theirs) < bound / 2
    return path
