"""Rounding with feedback: what it is expected to cost, and what is fitted to the integers it found.

Such a method (GPTQ, `two_sided`) ends with an error E = U_G^T (e) U_A of the weight, with
e_ij = d_ij / (U_G[i,i] U_A[j,j]) and d_ij what rounding element (i, j) changes once it has its
turn. The d_ij are close to independent, whatever the order, so that (as in the analysis of LDLQ by
Chee et al. 2023, "QuIP", arXiv 2307.13304)

    KL = 1/2 tr(E^T G E A) = 1/2 sum_ij r_i d_ij^2 c_j      in the mean, with
    r_i = (U_G G U_G^T)_ii / U_G[i,i]^2,    c_j = (U_A A U_A^T)_jj / U_A[j,j]^2

r and c belong to the layer, for all schemes; of a scheme only the d_ij^2 are wanted, for which
those of rounding to the nearest stand, with the scales that the method would choose. Of 44 pairs of
a layer and a scheme in two blocks of SmolLM2-135M this gave 0.83 to 1.35 of what `two_sided`
with 2 sweeps then cost, 0.98 in the mean; the cost of rounding alone to 2.9 to 33 times of it.

Scales of a rounded weight are fitted by least squares, in the metric of both Fisher factors.

The columns of a group g have one scale s_i for each row i; with q its integers (less the zero
point), the cost 1/2 tr(E^T G E A) of E = W - V, V = s q, is a quadratic function of all s_i, least
where they change by d:

    M d = r,    M_il = G_il (q_i A_gg q_l^T),    r_i = sum_{j in g} (G E A)_ij q_ij

Groups follow each other, each with the others as they are by then.

Coordinate descent on the integers that GPTQ found: each column once more, given all the others.

Behdin et al., "QuantEase: Optimization-based Quantization for Language Models" (arXiv 2309.01885).
With E = W - Q and G = E H, the error tr(E H E^T) as a function of column j alone is least at

    t_j = q_j + G_j / H_jj,        q_j <- the value of the grid next to t_j,   G -= (q_j' - q_j) H_j

A step never raises the error. GPTQ rounds each column before it knows the columns after it; here
all are known, and one sweep over the columns takes as long as GPTQ itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from formats.namespace import later
from formats.scheme import WeightSpec
from kernels.numerics import TYPES, QuantizedType, ScaleStorage, dequantize, round_to
from ptq.methods.common.rounding import expanded, round_weight
from ptq.methods.common.spec import ScaleSearch

with later():
    from kernels.triton.calibration import feedback as kernels


ROWS = 256  # of a weight that are rounded, about, where each row has scales of its own


def amplified(factor: Tensor, order: Tensor, metric: Tensor) -> Tensor:
    """(U M U^T)_jj / U_jj^2: what a step's squared error costs once later ones made up for it.

    Args:
        factor: U, rows and columns in `order` [n, n].
        order: int64 [n].
        metric: M, in which the error is counted [n, n].

    Returns:
        fp32 [n], in the order of M.
    """
    unit = factor / factor.diagonal()[:, None]
    found = ((unit @ metric[order][:, order]) * unit).sum(dim=1)
    return torch.empty_like(found).index_copy_(0, order, found)


@dataclass(frozen=True)
class Feedback:
    """A layer as a method would round it.

    Attributes:
        rows: r [out].
        columns: c [in].
        search: How scales are chosen.
        moments: E[x x^T] that they are chosen with [in, in].
    """

    rows: Tensor
    columns: Tensor
    search: ScaleSearch
    moments: Tensor

    def kl(self, weight: Tensor, spec: WeightSpec, dtype: ScaleStorage) -> Tensor:
        """Nats a token that a weight [out, in] is expected to cost: fp64, one element.

        Of a large one, rows an odd number apart stand for the others: all places in a head.
        """
        step = len(weight) // ROWS | 1 if spec.block[0] == 1 else 1
        some, rows = weight[::step], self.rows[::step].double()
        stored = round_weight(some, spec, dtype, self.search, self.moments)
        error = some - dequantize(stored.q, stored.scale, stored.zero_point, spec.block)
        found = rows @ (error.square().double() @ self.columns.double())
        return 0.5 * found * self.rows.double().sum() / rows.sum().clamp(min=1e-300)


MOST = 1.25  # a scale changes by no more than this factor
RIDGE = 1e-6  # share of the mean diagonal that is added to M


def fit_scales(
    weight: Tensor,
    q: Tensor,
    scale: Tensor,
    group_of: Tensor,
    rows: Tensor,
    columns: Tensor,
    storable: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Scales of least cost for given integers.

    Args:
        weight: fp32 [blocks, K, N]: rows of each diagonal block of G, transposed.
        q: Integers less zero points, or floats of the type, fp32 [blocks, K, N].
        scale: fp32 [blocks, groups, N].
        group_of: Group of each column, int64 [K].
        rows: G, fp32 [blocks, N, N], damped.
        columns: A, fp32 [K, K], damped.
        storable: Rounds scales [blocks, N] of a group, given by its index, to what the checkpoint
            holds.

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
        new = storable(torch.minimum(torch.maximum(old + change, old / MOST), old * MOST), group)
        found[:, group] = new
        errors[:, own] -= part * (new - old)[:, None]
    return found


def damped(hessian: Tensor, damp: float) -> Tensor:
    """H + lambda I, lambda a share of the mean diagonal; dead inputs get 1, and decide nothing."""
    diagonal = hessian.diagonal()
    return hessian + torch.diag(damp * diagonal.mean() + (diagonal == 0).float())


def descend(
    q: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    spec: WeightSpec,
    hessian: Tensor,
    order: Tensor,
    block_size: int,
) -> Tensor:
    """One sweep over the columns.

    Args:
        q: [N, K] in the type's storage, what is improved.
        weight: [N, K] float.
        scale: Of the spec's blocks.
        zero_point: Of the spec's blocks; None where the type is symmetric.
        hessian: [K, K], damped.
        order: int64 [K], columns in the order in which they are taken.
        block_size: Columns between two updates of the rest of G.

    Returns:
        q [N, K] in the type's storage.
    """
    kind = TYPES[spec.dtype]
    scales = expanded(scale, weight, spec).T[order].contiguous()  # [K, N]: a column is contiguous
    zeros = None if zero_point is None else expanded(zero_point, weight, spec).T[order].float()
    columns, h = q.T[order].float(), hessian[order][:, order]
    values = (columns if zeros is None else columns - zeros) * scales
    gradient = h @ (weight.T[order].float() - values)  # G^T
    taken, size = descent_columns, block_size
    if columns.is_cuda and kernels.knows(kind):
        taken, size = kernels.descent_block, min(block_size, kernels.WIDEST)
    for start in range(0, len(order), size):
        block = slice(start, min(start + size, len(order)))
        offset = None if zeros is None else zeros[block]
        moves = taken(
            columns[block],
            values[block],
            scales[block],
            offset,
            gradient[block],
            h[block, block],
            kind,
        )
        gradient[block.stop :].addmm_(h[block.stop :, block], moves, alpha=-1.0)
    restored = torch.empty_like(columns, dtype=q.dtype)
    restored[order] = columns.to(q.dtype)
    return restored.T.contiguous()


def descent_columns(
    columns: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    gradient: Tensor,
    hessian: Tensor,
    kind: QuantizedType,
) -> Tensor:
    """Take a block of columns; `kernels.triton.calibration.feedback.descent_block` is it for a GPU.

    Args:
        columns: fp32 [B, N]; gets the new values of the type.
        values: fp32 [B, N], what the former ones stand for.
        scales: fp32 [B, N].
        zeros: fp32 [B, N], or None.
        gradient: fp32 [B, N]; that of the block is used up.
        hessian: fp32 [B, B].

    Returns:
        What each column has moved by, fp32 [B, N].
    """
    moves, curvature = torch.empty_like(values), hessian.diagonal().tolist()
    for j in range(len(columns)):
        offset = None if zeros is None else zeros[j]
        target = torch.add(values[j], gradient[j], alpha=1.0 / curvature[j])
        rounded = round_to(target / scales[j], kind, offset)
        columns[j] = rounded
        known = rounded if offset is None else rounded - offset
        move = torch.sub(known * scales[j], values[j], out=moves[j])
        gradient[j + 1 :].addr_(hessian[j + 1 :, j], move, alpha=-1.0)
    return moves
