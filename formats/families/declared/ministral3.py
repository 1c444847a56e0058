"""Ministral 3 and the text of Mistral Small 3.2 and later: Mistral whose queries grow with position.

They do beyond the length that the model was first trained on (`Attention.growth_setting`), as
Llama 4's; the rotation is scaled by YaRN.
"""

from formats.families.family import Attention, Family

FAMILY = Family(
    model_types=("ministral3",), attention=Attention(growth_setting="llama_4_scaling_beta")
)
