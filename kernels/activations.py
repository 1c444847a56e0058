"""Activations of gated feed-forward layers, by name; every device's kernels take these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Clamped:
    """min(g, c) sigmoid(a min(g, c)) (clip(u, -c, c) + 1) of gate g and up u (gpt-oss).

    Attributes:
        slope: a.
        bound: c.
    """

    slope: float
    bound: float


Named = Literal["silu", "gelu_tanh", "gelu"]
Activation = Named | Clamped
"""x sigmoid(x); x Phi(x) with the normal distribution Phi by its approximation by tanh, or exactly
(Hendrycks and Gimpel 2016, arXiv 1606.08415); or one that changes the factor beside it too."""
