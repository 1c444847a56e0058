"""GLM-4-0414: GLM-4 with norms after the sub-layers too."""

from dataclasses import replace

from formats.families.declared import glm
from formats.families.family import Norms

FAMILY = replace(
    glm.FAMILY,
    model_types=("glm4",),
    norms=Norms(
        after_attention="post_self_attn_layernorm",
        before_feed_forward="post_attention_layernorm",
        after_feed_forward="post_mlp_layernorm",
    ),
)
