"""Llama (Touvron et al. 2023, arXiv 2302.13971): the decoder that others are told apart from."""

from formats.families.attention import Attention
from formats.families.family import Family

FAMILY = Family(
    model_types=("llama",), attention=Attention(bias_setting="attention_bias"), paddle="llama"
)
