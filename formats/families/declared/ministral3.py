"""Ministral 3 (Mistral AI 2025), text: Mistral whose queries grow with their position.

They do beyond the length that the model was first trained on (`Attention.growth_setting`), as
Llama 4's; the rotation is scaled by YaRN.
"""

from formats.families.family import Attention, Family

FAMILY = Family(
    model_types=("ministral3",), attention=Attention(growth_setting="llama_4_scaling_beta")
)
