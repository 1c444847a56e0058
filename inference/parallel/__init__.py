"""Tensor parallelism: one engine on several ranks, processes that each hold a part of the model."""
