"""The report of what quantization cost."""
