"""gpt-oss (OpenAI 2025, arXiv 2508.10925): experts in every block, most of them stored in MXFP4.

Attention has a logit for each head that takes part in its softmax and has no value (a sink), a bias
everywhere, and a window in every other layer. Gates and ups of experts are bounded before they are
multiplied.
"""

from formats.families.family import Attention, Family, GatedMLP, Mixture

FAMILY = Family(
    model_types=("gpt_oss",),
    attention=Attention(bias_setting="attention_bias", sinks="sinks"),
    mixture=Mixture(
        module="mlp",
        expert=GatedMLP(),
        count="num_local_experts",
        normalized=True,
        router="router",
        alternating=True,
        clamped=(("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)),
    ),
)
