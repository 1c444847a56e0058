"""Quantization methods, one algorithm a file."""
