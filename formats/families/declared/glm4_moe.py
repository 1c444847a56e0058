"""GLM-4.5, 4.6, 4.7 (Zeng et al. 2025, arXiv 2508.06471): experts chosen as in DeepSeek-V3.

Half of each head turns, q and k may have norms of their own, the first blocks are dense, and one
expert sees every token. The layer that predicts further tokens is that of DeepSeek-V3.
"""

from formats.families.declared import deepseek_v3
from formats.families.family import Attention, Family

FAMILY = Family(
    model_types=("glm4_moe",),
    attention=Attention(qk_norm="head", qk_norm_setting="use_qk_norm"),
    mixture=deepseek_v3.FAMILY.mixture,
    partial_rotary=0.5,
    predicting=deepseek_v3.FAMILY.predicting,
)
