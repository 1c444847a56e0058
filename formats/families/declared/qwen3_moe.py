"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with experts."""

from formats.families.family import Attention, Family, GatedMLP, Mixture

FAMILY = Family(
    model_types=("qwen3_moe",),
    attention=Attention(qk_norm="head"),
    mixture=Mixture(
        module="mlp", expert=GatedMLP(), count="num_experts", normalized="norm_topk_prob"
    ),
)
