"""Gemma 3 (arXiv 2503.19786), text: Gemma 2 with norms of q and k for the bound of attention.

Five of six layers have a window, and rotation angles of their own.
"""

from dataclasses import replace

from formats.families.declared import gemma2
from formats.families.family import Attention

FAMILY = replace(
    gemma2.FAMILY,
    model_types=("gemma3_text",),
    attention=Attention(
        bias_setting="attention_bias", scale=("query_pre_attn_scalar", -0.5), qk_norm="head"
    ),
)
