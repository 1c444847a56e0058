"""Shapes of models that speed is measured on without their weights, and schemes by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from formats.errors import RequestError, suggestion
from formats.families.registry import find_family, unsupported
from formats.foreign.mxfp4 import SCHEME as MXFP4
from formats.scheme import PRESETS, LayerScheme, Scheme
from formats.stored.folder import read_config

SHARED = {
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = SHARED | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
WINDOW, WHOLE = "sliding_attention", "full_attention"
OF_4B = {
    "hidden_size": 2560,
    "num_hidden_layers": 34,
    "intermediate_size": 10240,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {  # config.json by name
    "llama-1.1b": LLAMA
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 32000,
        "max_position_embeddings": 16384,
        "rope_theta": 10000.0,
    },
    "llama-3-8b": LLAMA
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
    "llama-3-70b": LLAMA
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
    "qwen3-30b-a3b": SHARED
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "gpt-oss-20b": SHARED
    | {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": [WINDOW, WHOLE] * 12,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "gemma-3-4b": SHARED
    | OF_4B
    | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "layer_types": ([WINDOW] * 5 + [WHOLE]) * 5 + [WINDOW] * 4,
        "rope_parameters": {
            WINDOW: {"rope_type": "default", "rope_theta": 10000.0},
            WHOLE: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
        "rms_norm_eps": 1e-6,
    },
    "gemma-3-4b-as-llama": LLAMA  # as many bytes of weights, and of a token in the cache
    | OF_4B
    | {"num_attention_heads": 16, "head_dim": 128, "rope_theta": 500000.0},
    "deepseek-v2-lite": SHARED
    | {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    },
}
PUBLISHED: dict[str, LayerScheme] = {"gpt-oss-20b": MXFP4}
"""What the experts of a shape are published in, and stay in whatever the scheme."""


def read_shape(text: str) -> tuple[str, dict[str, Any]]:
    """Name and config.json of a shape.

    Args:
        text: One of `SHAPES`, or the path of a config.json or of a folder that holds one.

    Raises:
        RequestError: it is neither.
        CheckpointError: the file is damaged.
    """
    if text in SHAPES:
        return text, dict(SHAPES[text])
    path = Path(text)
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise RequestError(
            f"shape: found {text!r}; {suggestion(text, SHAPES)}, or the path of a config.json or "
            "of a folder that holds one",
            "shape",
        )
    config = read_config(folder).model
    if find_family(config) is None:
        raise RequestError(
            f"shape: {unsupported(config, text)}; random checkpoints are made of these alone",
            "shape",
        )
    return folder.resolve().name, config


def read_scheme(text: str) -> Scheme:
    """The scheme of a preset's name; `float` quantizes nothing.

    Raises:
        RequestError: there is no such preset.
    """
    if text == "float":
        return Scheme()
    if text not in PRESETS:
        raise RequestError(
            f"scheme: found {text!r}; {suggestion(text, ['float', *PRESETS])}", "scheme"
        )
    return PRESETS[text]
