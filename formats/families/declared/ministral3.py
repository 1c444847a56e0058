"""Ministral 3 (Mistral AI 2025), text: Mistral whose queries grow with their position.

They do beyond the length that the model was first trained on (`Attention.growth_setting`), as
Llama 4's; the rotation is scaled by YaRN.
"""

from formats.families.attention import Attention
from formats.families.family import Family

FAMILY = Family(
    model_types=("ministral3",), attention=Attention(growth_setting="llama_4_scaling_beta")
)
