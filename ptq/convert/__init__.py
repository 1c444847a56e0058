"""Checkpoints from and to other layouts."""
