"""A tiny configuration of whatever causal LM transformers knows.

Configurations are made from their class's defaults with the sizes below in the place of its own,
where it has a size of that name. What no name tells is given by type in `OWN`.
"""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER, EXPERT = 2, 128, 4, 2, 32, 256, 128
SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": HIDDEN,
    "d_model": HIDDEN,
    "n_embd": HIDDEN,
    "embedding_size": HIDDEN,
    "word_embed_proj_dim": HIDDEN,
    "embedding_dim": HIDDEN,
    "intermediate_size": INNER,
    "intermediate_size_mlp": INNER,
    "dense_intermediate_size": INNER,
    "ffn_dim": INNER,
    "ffn_hidden_size": INNER,
    "n_inner": INNER,
    "dff": INNER,
    "decoder_ffn_dim": INNER,
    "encoder_ffn_dim": INNER,
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_layers": LAYERS,
    "num_attention_heads": HEADS,
    "n_head": HEADS,
    "n_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_attention_heads": HEADS,
    "swa_num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "swa_num_key_value_heads": KV_HEADS,
    "num_global_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "rotary_dim": HEAD // 2,
    "kv_channels": HEAD,
    "swa_head_dim": HEAD,
    "global_head_dim": HEAD,
    "swa_v_head_dim": HEAD,
    "attention_head_dim": HEAD,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "sliding_window": 16,
    "attention_window": 16,
    "local_attention": 16,
    "attention_chunk_size": 512,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": EXPERT,
    "expert_ffn_hidden_size": EXPERT,
    "shared_expert_intermediate_size": EXPERT,
    "shared_intermediate_size": EXPERT,
    "moe_shared_expert_intermediate_size": EXPERT,
    "kv_lora_rank": HIDDEN,
    "q_lora_rank": HIDDEN,
    "o_lora_rank": HIDDEN,
    "qk_nope_head_dim": HEAD,
    "qk_rope_head_dim": HEAD // 2,
    "v_head_dim": HEAD,
    "index_n_heads": HEADS,
    "index_head_dim": HEAD,
    "index_topk": 512,
    "vocab_size_per_layer_input": 384,
    "hidden_size_per_layer_input": HIDDEN,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LAYER_COUNTS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
OWN: dict[str, dict[str, Any]] = {  # what the sizes above do not tell
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 2, "state_size": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16},
    "kimi_linear": {"linear_num_heads": 2, "linear_head_dim": 128},
    "olmo_hybrid": {"linear_key_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"num_hidden_layers": 3}  # the third has what the second has
    | {key: ["mamba", "hybrid", "hybrid"] for key in ("layer_types", "layers_block_type")},
    "zamba": {"num_hidden_layers": 3, "mamba_dt_rank": 8}
    | {key: ["mamba", "hybrid", "hybrid"] for key in ("layer_types", "layers_block_type")},
    "bloom": {"seq_length": 512},  # as published ones have
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": EXPERT, "moe_top_k": 2},
    },
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_heads": HEADS,
        "window_size": 16,
    },
    "gemma3n_text": {
        "layer_types": 2 * ["sliding_attention", "full_attention"],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": INNER,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "laurel_rank": 32,
        "hidden_size_per_layer_input": 64,
    },
    "gemma4_text": {
        "layer_types": 2 * ["sliding_attention", "full_attention"],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "global_head_dim": 2 * HEAD,
        "hidden_size_per_layer_input": 64,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2, "head_dim": HEAD // 2},
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration of a type of transformers, as small as its layers allow.

    Raises:
        ValueError: the type's own code refuses it, or holds other models.
    """
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    known = {*default.to_dict(), *default.attribute_map, *vars(default)}
    values = {key: value for key, value in SIZES.items() if key in known}
    kinds = tuple(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    fixed = isinstance(getattr(kind, "layer_types", None), property)  # of other values
    if len(kinds) > 1 and not fixed:  # one layer of each kind
        values |= {"layer_types": list(kinds), **dict.fromkeys(LAYER_COUNTS & known, len(kinds))}
    if "kv_lora_rank" in known:  # latent attention: heads are not cut from these
        values.pop("head_dim", None)
        values["num_key_value_heads"] = HEADS
    return AutoConfig.for_model(model_type, **values | OWN.get(model_type, {}))
