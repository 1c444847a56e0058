"""Llama (Touvron et al. 2023, arXiv 2302.13971): the decoder that others differ from."""

from formats.families.family import Attention, Family

FAMILY = Family(
    model_types=("llama",), attention=Attention(bias_setting="attention_bias"), paddle="llama"
)
