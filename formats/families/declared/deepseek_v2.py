"""DeepSeek-V2, V2-Lite (arXiv 2405.04434): latent attention, experts beside one for all tokens."""

from formats.families.family import ExpertGroups, Family, GatedMLP, LatentAttention, Mixture

FAMILY = Family(
    model_types=("deepseek_v2",),
    attention=LatentAttention(watched_pairs="interleaved"),
    mixture=Mixture(
        module="mlp",
        expert=GatedMLP(),
        count="n_routed_experts",
        normalized=False,
        shared="shared_experts",
        groups=ExpertGroups(best=1, only_if=("topk_method", "group_limited_greedy")),
        factor="routed_scaling_factor",
    ),
)
