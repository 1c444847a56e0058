"""Adapters (LoRA): read, checked against their base, moved to a quantized one, merged into it."""

from formats.adapters.lora import Lora, LoraWeights, read_lora

__all__ = ["Lora", "LoraWeights", "read_lora"]
