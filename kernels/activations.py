"""Activations of gated feed-forward layers by name, and gates of norms; all devices take these."""

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


@dataclass(frozen=True)
class Gate:
    """How a norm of rows x has a gate g of their shape: norm(x) f(g), or norm(x f(g)).

    Attributes:
        silu: f is silu, else the sigmoid.
        first: norm(x f(g)).
        groups: Into how many equal parts, each normed by itself, a row is cut.
    """

    silu: bool = True
    first: bool = False
    groups: int = 1


Named = Literal["silu", "gelu_tanh", "gelu"]
Activation = Named | Clamped
"""x sigmoid(x); x Phi(x) with the normal distribution Phi by its approximation by tanh, or exactly
(Hendrycks and Gimpel 2016, arXiv 1606.08415); or one that changes the factor beside it too."""
