"""Tiny models of Gemma 4's layouts, and of Gemma 3n, which has several hidden states of a token."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tests.conftest import write_random
from tests.tiny_models import tiny_config

KINDS = ["sliding_attention", "full_attention"]
TEXT: dict[str, Any] = {
    "vocab_size": 384, "vocab_size_per_layer_input": 384, "hidden_size": 128,
    "hidden_size_per_layer_input": 0, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 64,
    "max_position_embeddings": 512, "sliding_window": 16, "layer_types": KINDS,
    "final_logit_softcapping": 3.0, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
K_IS_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
SHARED = {"num_hidden_layers": 4, "layer_types": 2 * KINDS, "num_kv_shared_layers": 2}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},  # heads of two sizes
    "k_is_v": K_IS_V,
    "per_layer": {"hidden_size_per_layer_input": 64},
    "shared": SHARED | {"hidden_size_per_layer_input": 64, "use_double_wide_mlp": True},
    "experts": K_IS_V | EXPERTS | {"moe_intermediate_size": 128},
}
ALL = (*LAYOUTS, "gemma3n")


def write_tiny(folder: Path, layout: str) -> Path:
    """Write a random model of a layout, or of Gemma 3n."""
    if layout == "gemma3n":
        return write_random(folder, tiny_config("gemma3n_text"))
    return write_random(folder, AutoConfig.for_model("gemma4_text", **TEXT | LAYOUTS[layout]))


def write_wide(folder: Path, size: int) -> Path:
    """Write a random model whose global layers have heads of a size."""
    values = TEXT | LAYOUTS["k_is_v"] | {"global_head_dim": size}
    return write_random(folder, AutoConfig.for_model("gemma4_text", **values))
