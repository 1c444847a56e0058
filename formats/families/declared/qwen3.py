"""Qwen3 (arXiv 2505.09388): Llama with norms of q and k over each head."""

from formats.families.family import Attention, Family

FAMILY = Family(
    model_types=("qwen3",), attention=Attention(qk_norm="head", bias_setting="attention_bias")
)
