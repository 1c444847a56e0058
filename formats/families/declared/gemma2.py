"""Gemma 2 (arXiv 2408.00118): Gemma with norms before and after the sub-layers, and bounded logits.

Logits of attention and of the head pass c tanh(x / c); every second layer has a window; queries are
scaled by a number of their own in the place of the size of a head.
"""

from formats.families.family import Attention, Family, GatedMLP, Multipliers, Norms

FAMILY = Family(
    model_types=("gemma2",),
    attention=Attention(
        bias_setting="attention_bias",
        scale=("query_pre_attn_scalar", -0.5),
        softcap_setting="attn_logit_softcapping",
    ),
    feed_forward=GatedMLP(activation_setting="hidden_activation"),
    norms=Norms(
        after_attention="post_attention_layernorm",
        before_feed_forward="pre_feedforward_layernorm",
        after_feed_forward="post_feedforward_layernorm",
        offset=1.0,
    ),
    multipliers=Multipliers(embedding="sqrt_hidden_size", logits_softcap="final_logit_softcapping"),
)
