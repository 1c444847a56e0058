"""Decoders as their families declare them."""
