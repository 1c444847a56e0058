"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases of q, k and v, but never of o."""

from formats.families.family import Family

FAMILY = Family(model_types=("qwen2",), paddle="qwen2")
