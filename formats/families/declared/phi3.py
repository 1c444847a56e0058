"""Phi-3, Phi-3.5-mini, Phi-4-mini (arXiv 2404.14219, 2503.01743): q, k, v and gate, up as one each.

Otherwise it is Llama, with rotary embedding of a part of each head (three quarters in Phi-4-mini)
and, for long contexts, LongRoPE's frequencies (Ding et al. 2024, arXiv 2402.13753).
"""

from formats.families.family import Attention, Family, GatedMLP

FAMILY = Family(
    model_types=("phi3",),
    attention=Attention(stored_merged=True),
    feed_forward=GatedMLP(stored_merged=True),
    rope_types=("default", "longrope"),
    partial_rotary=1.0,
)
