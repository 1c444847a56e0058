"""Scales of a rounded weight by least squares, in the metric of both Fisher factors.

The columns of a group g have one scale s_i for each row i; with q its integers (less the zero
point), the cost 1/2 tr(E^T G E A) of E = W - V, V = s q, is a quadratic function of all s_i, least
where they change by d:

    M d = r,    M_il = G_il (q_i A_gg q_l^T),    r_i = sum_{j in g} (G E A)_ij q_ij

Groups follow each other, each with the others as they are by then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MOST = 1.25  # a scale changes by no more than this factor
RIDGE = 1e-6  # share of the mean diagonal that is added to M


def fit_scales(
    weight: Tensor,
    q: Tensor,
    scale: Tensor,
    group_of: Tensor,
    rows: Tensor,
    columns: Tensor,
    storable: Callable[[Tensor], Tensor],
) -> Tensor:
    """Scales of least cost for given integers.

    Args:
        weight: fp32 [blocks, K, N]: rows of each diagonal block of G, transposed.
        q: Integers less zero points, or floats of the type, fp32 [blocks, K, N].
        scale: fp32 [blocks, groups, N].
        group_of: Group of each column, int64 [K].
        rows: G, fp32 [blocks, N, N], damped.
        columns: A, fp32 [K, K], damped.
        storable: Rounds scales to what the checkpoint holds.

    Returns:
        fp32 [blocks, groups, N].
    """
    found = scale.clone()
    errors = weight - q * scale[:, group_of]
    for group in range(scale.shape[1]):
        own = (group_of == group).nonzero()[:, 0]
        part = q[:, own]
        spread = columns[own] @ errors @ rows
        right = (spread * part).sum(dim=1)
        matrix = (rows * (part.mT @ columns[own][:, own] @ part)).double()
        diagonal = matrix.diagonal(dim1=1, dim2=2)
        ridge = RIDGE * diagonal.mean(dim=1, keepdim=True) + (diagonal == 0)
        lower, failed = torch.linalg.cholesky_ex(matrix + torch.diag_embed(ridge))
        if bool(failed.any()):
            continue
        change = torch.cholesky_solve(right.double()[..., None], lower)[..., 0].float()
        old = found[:, group]
        new = storable(torch.minimum(torch.maximum(old + change, old / MOST), old * MOST))
        found[:, group] = new
        errors[:, own] -= part * (new - old)[:, None]
    return found
