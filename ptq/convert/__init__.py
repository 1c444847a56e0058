"""Checkpoints from and to other layouts: what one can be converted to, by name."""

TARGETS = ("gptq", "gptq_v2", "awq", "fp8_block", "gguf", "compressed_tensors", "paddle", "float")
FLOAT_TYPES = ("bfloat16", "float16", "float32")
