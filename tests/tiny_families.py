"""What makes a tiny model of a declared family show all that the family has: by model_type."""

from __future__ import annotations

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
