"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671): Qwen2 with experts, one of them for all tokens."""

from formats.families.family import Family, GatedMLP, Mixture

FAMILY = Family(
    model_types=("qwen2_moe",),
    mixture=Mixture(
        module="mlp",
        expert=GatedMLP(),
        count="num_experts",
        normalized="norm_topk_prob",
        shared="shared_expert",
        shared_gate="shared_expert_gate",
    ),
)
