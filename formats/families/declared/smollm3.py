"""SmolLM3 (Bakouch et al. 2025): Llama, every fourth layer of which does not turn q and k."""

from formats.families.family import Attention, Family

FAMILY = Family(
    model_types=("smollm3",),
    attention=Attention(bias_setting="attention_bias", unrotated_setting="no_rope_layers"),
)
