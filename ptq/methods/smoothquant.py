"""SmoothQuant: moves the outliers of activations into weights, where int8 can hold them.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", ICML 2023 (arXiv 2211.10438), with factors (Eq. 4)

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)

for every group of `ptq.methods.migration`. alpha is fixed or searched for each group, or for pieces
of its channels (`ptq.methods.piecewise`). Static input
scales are those of absmax, which for a smoothed input is known without running it:
max_j max|X_j| / s_j.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ptq.methods.migration import Choice, Migration, SmoothedGroup
from ptq.methods.piecewise import pieces_of, search_pieces
from ptq.methods.specs import SmoothQuantSpec


def smoothing_scale(x_absmax: Tensor, w_absmax: Tensor, alpha: float) -> Tensor:
    """Equation 4, in fp64.

    Args:
        x_absmax: max|X_j| of each channel [channels].
        w_absmax: max|W_j| of the consumers' columns [channels].
        alpha: Migration strength; 1 moves all of the difficulty into the weights.

    Returns:
        s [channels] fp64; 1 where a channel is dead on either side, as nothing is to be balanced.
    """
    x, w = x_absmax.double(), w_absmax.double()
    scale = x.pow(alpha) / w.pow(1.0 - alpha)
    return torch.where((x > 0) & (w > 0), scale, torch.ones_like(scale))


class SmoothQuant(Migration):
    """Smooths every group of a block that can be folded; see the module's docstring."""

    def __init__(self, spec: SmoothQuantSpec) -> None:
        super().__init__()
        self.spec, self.targets, self.search_samples = spec, spec.targets, spec.search_samples
        self.needs = "samples" if spec.alpha == "search" else "statistics"

    @property
    def alphas(self) -> tuple[float, ...]:
        """The strengths to try."""
        return self.spec.alphas if self.spec.alpha == "search" else (self.spec.alpha,)

    def refined(
        self,
        choice: Choice,
        group: SmoothedGroup,
        scales: Mapping[float | None, Tensor],
        reference: Sequence[Tensor],
    ) -> Choice:
        """Search the strengths of pieces, where the recipe asks for more than one."""
        if self.spec.pieces == 1:
            return choice
        piece = pieces_of(group.x_absmax, self.spec.pieces)
        return search_pieces(
            piece, scales, choice, lambda scale: group.error(group.fold(scale), reference)
        )

    def candidates(self, group: SmoothedGroup) -> Mapping[float, Tensor]:
        """Equation 4 for each strength."""
        x, w = group.x_absmax, group.w_absmax
        return {alpha: smoothing_scale(x, w, alpha) for alpha in self.alphas}
