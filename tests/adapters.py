"""Adapters of random weights, in the files that PEFT writes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from formats.checkpoint.read import Checkpoint

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    base: Mapping[str, Any] | Path,
    rank: int = 4,
    targets: Sequence[str] = TARGETS,
    seed: int = 0,
    scale: float = 1.0,
    **settings: Any,
) -> Path:
    """Write an adapter of a Llama-like model; returns its folder.

    Args:
        folder: Made where it is not there.
        base: Its `config.json` as read, or the folder that holds it.
        rank: r; alpha is 2 r.
        targets: Linear layers that it adapts, in every block.
        seed: Of its weights.
        scale: Of B; 1 changes most tokens of a tiny model.
        settings: Of `adapter_config.json`, in the place of the usual ones.
    """
    config = json.loads((base / "config.json").read_text()) if isinstance(base, Path) else base
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv = (config.get("num_key_value_heads") or heads) * head
    sizes = {"q_proj": (heads * head, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    sizes |= {"o_proj": (hidden, heads * head), "gate_proj": (inner, hidden)}
    sizes |= {"up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name in targets:
            part = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{part}.{name}"
            outputs, inputs = sizes[name]
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, rank, generator=generator) / (2 * rank) ** 0.5
            tensors[f"{prefix}.lora_A.weight"] = a
            tensors[f"{prefix}.lora_B.weight"] = b * scale / 2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "use_rslora": False,
        "fan_in_fan_out": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(written | settings))
    return folder


def write_prefix(folder: Path, base: Path, tokens: int, seed: int = 0, **settings) -> Path:
    """A prefix as PEFT's `save_pretrained` writes it."""
    checkpoint = Checkpoint.open(base)
    blocks = checkpoint.config["num_hidden_layers"]
    width = checkpoint.weight_shape("model.layers.0.self_attn.k_proj")[0]
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randn(tokens, 2 * blocks * width, generator=generator)
    folder.mkdir()
    own = {"peft_type": "PREFIX_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": tokens}
    (folder / "adapter_config.json").write_text(json.dumps(own | settings))
    save_file({"prompt_embeddings": prompt}, folder / "adapter_model.safetensors")
    return folder


def prefix_logits(base: Path, adapter: Path, tokens: list[int]) -> torch.Tensor:
    """What transformers gives after a cache that holds the prefix, as PEFT hands it over."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    prompt = load_file(adapter / "adapter_model.safetensors")["prompt_embeddings"]
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own = prompt.view(len(prompt), config.num_hidden_layers, 2, config.num_key_value_heads, dim)
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        k, v = own[:, layer].permute(1, 2, 0, 3)[:, None]
        cache.update(k, v, layer)
    with torch.no_grad():
        return model(torch.tensor([tokens]), past_key_values=cache).logits[0]
