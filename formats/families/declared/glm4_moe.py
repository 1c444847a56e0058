"""GLM-4.5, 4.6, 4.7 (Zeng et al. 2025, arXiv 2508.06471): experts chosen as in DeepSeek-V3.

Half of each head turns, q and k may have norms of their own, the first blocks are dense, and one
expert sees every token. The layer that predicts further tokens is that of DeepSeek-V3.
"""

from formats.families.family import Attention, ExpertGroups, Family, GatedMLP, Mixture
from formats.families.predicting import Predicting

FAMILY = Family(
    model_types=("glm4_moe",),
    attention=Attention(qk_norm="head", qk_norm_setting="use_qk_norm"),
    mixture=Mixture(
        module="mlp",
        expert=GatedMLP(),
        count="n_routed_experts",
        normalized="norm_topk_prob",
        shared="shared_experts",
        scores="sigmoid",
        correction="e_score_correction_bias",
        groups=ExpertGroups(best=2),
        factor="routed_scaling_factor",
    ),
    partial_rotary=0.5,
    predicting=Predicting(),
)
