"""DeepSeek-V3, R1 (arXiv 2412.19437): V2 with experts scored by sigmoids and corrected scores.

The layer that predicts further tokens, which its files have after the last block, drafts
(`inference.speculate.methods.mtp`).
"""

from formats.families.family import ExpertGroups, Family, GatedMLP, LatentAttention, Mixture
from formats.families.predicting import Predicting

FAMILY = Family(
    model_types=("deepseek_v3",),
    attention=LatentAttention(interleaved_setting="rope_interleave"),
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
    predicting=Predicting(),
)
