"""Piecewise search of smoothing strengths: one for each piece of a group's channels.

One strength for all channels of a group is a compromise between the few that stand out and the many
that do not. Here the channels are clustered by their largest magnitude into k pieces (quantiles),
and each piece gets a strength of its own: coordinate descent from the best common strength, piece
by piece from the largest magnitudes down, on the same measure of error. The idea is that of
PaddleSlim's PieceWiseSearch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ptq.methods.migration import Choice


def pieces_of(magnitude: Tensor, count: int) -> Tensor:
    """Which piece each channel belongs to: int64 [channels], 0 for the largest magnitudes.

    Pieces have equal numbers of channels, up to one.
    """
    rank = torch.empty(len(magnitude), dtype=torch.int64)
    rank[magnitude.argsort(descending=True, stable=True)] = torch.arange(len(magnitude))
    return rank * count // len(magnitude)


def search_pieces(
    piece: Tensor,
    scales: Mapping[float | None, Tensor],
    start: Choice,
    error: Callable[[Tensor], float],
) -> Choice:
    """Strengths of the pieces, found one after the other; never worse than what they start from.

    Args:
        piece: From `pieces_of`.
        scales: Factors [channels] of each strength; None is no smoothing.
        start: One strength for all pieces.
        error: Error with factors [channels].
    """
    count = int(piece.max().item()) + 1
    assert start.error is not None
    best, least = Choice(start.alphas * count, start.scale, start.error), start.error
    for index in range(count):
        for alpha, scale in scales.items():
            if alpha == start.alphas[0]:  # known
                continue
            alphas = (*best.alphas[:index], alpha, *best.alphas[index + 1 :])
            trial = torch.where(piece == index, scale, best.scale)
            found = error(trial)
            if found < least:
                best, least = Choice(alphas, trial, found), found
    return best
