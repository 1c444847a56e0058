"""Shapes of models that speed is measured on without their weights, and schemes by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from formats.errors import RequestError, suggestion
from formats.families.registry import find_family, unsupported
from formats.foreign.mxfp4 import SCHEME as MXFP4
from formats.scheme import PRESETS, LayerScheme, Scheme
from formats.stored.folder import CONFIG, read_config

SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)


def _config(named: dict[str, Any], *sizes: int, **others: Any) -> dict[str, Any]:
    """The config.json of a model: what all have, its sizes in the order of `SIZES`, and others."""
    shared = {"hidden_act": "silu", "tie_word_embeddings": False}
    shared |= {"bos_token_id": 0, "eos_token_id": 0, "rms_norm_eps": 1e-5}
    return shared | named | dict(zip(SIZES, sizes, strict=True)) | others


def _yarn(base: float, factor: float, **others: Any) -> dict[str, Any]:
    """Rotary positions stretched by YaRN from 4,096 on."""
    yarn = {"rope_type": "yarn", "rope_theta": base, "factor": factor}
    lengths = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    return yarn | lengths | others


WINDOW, WHOLE = "sliding_attention", "full_attention"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
}
DEEPSEEK_V2 = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
}
# fmt: off
SHAPES: dict[str, dict[str, Any]] = {  # config.json by name
    "llama-1.1b": _config(LLAMA, 2048, 16, 32, 8, 64, 8192, 32000, 16384, rope_theta=1e4),
    "llama-3-8b": _config(LLAMA, 4096, 32, 32, 8, 128, 14336, 128256, 131072, rope_theta=5e5),
    "llama-3-70b": _config(LLAMA, 8192, 80, 64, 8, 128, 28672, 128256, 131072, rope_theta=5e5),
    "qwen3-30b-a3b": _config(
        QWEN3_MOE, 2048, 48, 32, 4, 128, 6144, 151936, 40960,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        norm_topk_prob=True, rms_norm_eps=1e-6, rope_theta=1e6,
    ),
    "gpt-oss-20b": _config(
        GPT_OSS, 2880, 24, 64, 8, 64, 2880, 201088, 131072,
        num_local_experts=32, num_experts_per_tok=4, swiglu_limit=7.0,
        attention_bias=True, sliding_window=128, layer_types=[WINDOW, WHOLE] * 12,
        rope_parameters=_yarn(150000.0, 32.0, truncate=False),
    ),
    "gemma-3-4b": _config(
        GEMMA3, 2560, 34, 8, 4, 256, 10240, 262208, 131072,
        tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256, sliding_window=1024, rms_norm_eps=1e-6,
        layer_types=([WINDOW] * 5 + [WHOLE]) * 5 + [WINDOW] * 4,
        rope_parameters={
            WINDOW: {"rope_type": "default", "rope_theta": 10000.0},
            WHOLE: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    ),
    "gemma-3-4b-as-llama": _config(  # as many bytes of weights, and of a token in the cache
        LLAMA, 2560, 34, 16, 8, 128, 10240, 262208, 131072,
        tie_word_embeddings=True, rope_theta=5e5,
    ),
    "deepseek-v2-lite": _config(
        DEEPSEEK_V2, 2048, 27, 16, 16, 64, 10944, 102400, 163840,
        kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, rms_norm_eps=1e-6,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
        moe_intermediate_size=1408, first_k_dense_replace=1, norm_topk_prob=False,
        routed_scaling_factor=1.0, topk_method="greedy", n_group=1, topk_group=1,
        rope_parameters=_yarn(10000.0, 40.0, mscale=0.707, mscale_all_dim=0.707),
    ),
}
# fmt: on
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
    path = Path(os.path.expanduser(text))
    path = path / CONFIG if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        raise RequestError(
            f"shape: found {text!r}; {suggestion(text, SHAPES)}, or the path of a config.json or "
            "of a folder that holds one",
            "shape",
        )
    config = read_config(path.parent, path.name).model
    if find_family(config) is None:
        raise RequestError(
            f"shape: {unsupported(config, text)}; random checkpoints are made of these alone",
            "shape",
        )
    return path.resolve().parent.name if path.name == CONFIG else path.stem, config


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
