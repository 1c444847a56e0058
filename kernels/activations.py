"""Activations of gated feed-forward layers, by name; every device's kernels take these."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu"]
"""x sigmoid(x); x Phi(x) with the normal distribution Phi by its approximation by tanh, or exactly
(Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
