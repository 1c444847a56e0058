"""Gemma (arXiv 2403.08295): Llama with GEGLU, norms that multiply by 1 + w and a scaled embedding.

The embedding's rows are multiplied by sqrt(H), H the hidden size; the head, which is the embedding,
is not.
"""

from formats.families.family import Attention, Family, Multipliers, Norms

FAMILY = Family(
    model_types=("gemma",),
    attention=Attention(bias_setting="attention_bias"),
    norms=Norms(offset=1.0),
    multipliers=Multipliers(embedding="sqrt_hidden_size"),
)
