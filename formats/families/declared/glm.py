"""GLM-4 (arXiv 2406.12793): Llama with biases of q, k and v, and gate and up stored as one.

The first half of each head turns, in pairs of channels that lie side by side.
"""

from formats.families.family import Attention, Family, GatedMLP

FAMILY = Family(
    model_types=("glm",),
    attention=Attention(rotary_pairs="interleaved"),
    feed_forward=GatedMLP(stored_merged=True),
    partial_rotary=0.5,
)
