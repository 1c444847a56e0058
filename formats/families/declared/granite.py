"""Granite 3 (Granite Team 2024): Llama with a factor each of embedding, q k^T and sub-layers.

The logits are divided by one too. The factors are those of maximal update parametrization (Yang et
al. 2022, arXiv 2203.03466).
"""

from formats.families.family import Attention, Family, Multipliers

FAMILY = Family(
    model_types=("granite",),
    attention=Attention(bias_setting="attention_bias", scale=("attention_multiplier", 1.0)),
    multipliers=Multipliers(
        embedding="embedding_multiplier", residual="residual_multiplier", logits="logits_scaling"
    ),
)
