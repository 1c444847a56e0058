"""A certificate of what quantization cost: figures paired with the original, judged by tests."""
