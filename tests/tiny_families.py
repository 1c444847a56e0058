"""What makes a tiny model of a declared family show all that the family has: by model_type."""

from typing import Any

KINDS = ["sliding_attention", "full_attention"]
TINY: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": {
        "sliding_window": 24,
        "query_pre_attn_scalar": 48,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "sliding_window": 24,
        "query_pre_attn_scalar": 48,
        "layer_types": KINDS,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
        },
    },
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.1,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm": {},
    "glm4": {},
    "olmo3": {"sliding_window": 24, "layer_types": KINDS},
    "ministral": {"sliding_window": 24, "layer_types": KINDS},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 32.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    },
}
"""Overrides of the shape that `tests.conftest.write_model` gives: two layers, four heads of 32."""

_LATENT = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
DEEPSEEK: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", _LATENT | {"topk_method": "group_limited_greedy"}),
    "v2_lite": ("deepseek_v2", _LATENT | {"q_lora_rank": None, "topk_method": "greedy"}),
    "v3": (
        "deepseek_v3",
        _LATENT | {"rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "v3_halves": ("deepseek_v3", _LATENT | {"rope_interleave": False}),
}
"""Likewise, of families that cache a latent: model_type and overrides, the second block a mixture."""
