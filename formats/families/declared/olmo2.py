"""OLMo 2 (arXiv 2501.00656): Llama with its norms after the sub-layers, before they are added.

    x = x + norm(attention(x))        x = x + norm(feed_forward(x))

q and k pass RMSNorms over their whole projection, all heads together.
"""

from formats.families.family import Attention, Family, Norms

FAMILY = Family(
    model_types=("olmo2",),
    attention=Attention(qk_norm="projection"),
    norms=Norms(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_feed_forward=None,
        after_feed_forward="post_feedforward_layernorm",
    ),
)
