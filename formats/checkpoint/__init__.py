"""Checkpoint folders: reading and writing, in the compressed-tensors layout."""
