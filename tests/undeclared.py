"""Tiny models of types that no family declares: what their configs need beside the usual sizes."""

from typing import Any

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
UNDECLARED: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "starcoder2": {},  # LayerNorm, biases everywhere, an up projection without a gate
    "gpt_neox": {"tie_word_embeddings": False},  # q, k, v by one layer, two branches side by side
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128, "activation_function": "relu"},
    "stablelm": {},  # a quarter of each head turns; LayerNorm
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64}
    | {"moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "phimoe": EXPERTS | {"num_local_experts": 4, "intermediate_size": 64},  # renamed when loaded
}
