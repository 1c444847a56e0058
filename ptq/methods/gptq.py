"""GPTQ: rounds a weight column by column and lets the columns to come make up for the error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
ICLR 2023 (arXiv 2210.17323). For each layer it minimizes ||W X - Q X||^2 = tr(E H E^T), E = W - Q,
H = E[x x^T] + lambda I. With U the upper Cholesky factor of H^-1 (Step 3), column j in turn:

    e = (w_j - q_j) / U_jj,        w_k -= e U_jk  for all k > j                     (Eq. 2, 3)

Columns go in blocks; the columns beyond a block are updated once, when it is done (Step 2). With
`act_order` columns go by falling diagonal of H; scales and zero points are chosen before, for
groups of neighbouring columns as they stand in the checkpoint ("static groups"), so that nothing of
the order remains on disk. Layers that share an input share H and its factor; those of one module,
such as q, k and v, are solved as one. `sweeps` of coordinate descent over the integers may follow
(`ptq.methods.common.with_feedback`).

lambda is `damp` times the mean of H's diagonal. If H does not factor, lambda is raised tenfold
until it does; if it never does, or if a layer's error tr(E H E^T) comes out larger than that of
rounding with the same scales, the layer is rounded. Each of these is a reported event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from formats.namespace import later
from formats.scheme import WeightSpec
from ptq.methods.common.block import BlockWork, QuantizedLinear
from ptq.methods.common.method import LayerMethod, layers_by_input
from ptq.methods.common.spec import FLOAT, BlockSizes, MethodSpec, PlannedLayer, ScaleSearch, Stage

if TYPE_CHECKING:
    from torch import Tensor
with later():
    import torch

    import kernels.numerics as numerics
    from formats.stored import weights as storage
    from kernels.triton.calibration import feedback as kernels
    from ptq.methods.common import moments, rounding, with_feedback
    from ptq.methods.common import with_feedback as expected

MOST_DAMP = 10.0
SOLVED_WHOLE = 512  # inputs of a triangle that is inverted at once


class GPTQSpec(MethodSpec):
    """GPTQ: rounds column by column; later columns compensate the error of earlier ones.

    YAML::

        gptq:
          scale: output_mse       # as of rtn
          act_order: true         # important columns first; leaves no trace on disk
          damp: 0.01              # share of the Hessian's mean diagonal that is added to it
          block_size: 128         # columns between two updates of the rest
          sweeps: 0               # of coordinate descent over the integers afterwards
    """

    stage: ClassVar = Stage.ROUND
    name: Literal["gptq"] = "gptq"
    scale: ScaleSearch = "output_mse"
    """How scales are chosen before rounding, as of `rtn`."""
    act_order: bool = True
    """Important columns first: more accurate, without a trace on disk."""
    damp: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 0.01
    """Share of the Hessian's mean diagonal that is added to it. Raise it where calibration has few
    tokens; a Hessian that does not factor raises it by itself.
    """
    block_size: Annotated[int, Field(ge=1)] = 128
    """Columns between two updates of the rest: a matter of speed alone."""
    sweeps: Annotated[int, Field(ge=0)] = 0
    """Rounds of coordinate descent over the integers afterwards: 2 or 3 gain a little for some more
    seconds.
    """

    def algorithm(self) -> GPTQ:
        """Solves the layers of a block."""
        return GPTQ(self)

    def explain(self, layer: PlannedLayer) -> Iterator[str]:
        """In which order the layer is solved."""
        order = "important columns first" if self.act_order else "columns in order"
        sweeps = f", {self.sweeps} sweeps of descent after it" if self.sweeps else ""
        yield f"gptq: solved column by column, {order}, scales by {self.scale}{sweeps}"

    def memory(self, block: BlockSizes) -> int:
        """Integers, and fp32 and fp64 copies of the widest Hessian while it is factored."""
        return block.elements + (2 * FLOAT + 4 * 8) * block.widest**2


def inverse_factor(hessian: Tensor, damp: float) -> tuple[Tensor, float] | None:
    """Upper Cholesky factor of the damped inverse.

    Args:
        hessian: [K, K], its dead diagonal entries replaced.
        damp: Share of the mean diagonal that is added to it.

    Returns:
        (U with U^T U = (H + lambda I)^-1, fp32 [K, K], the share that was needed), or None if
        no share up to 10 makes it positive definite.
    """
    mean = hessian.double().diagonal().mean()
    while damp <= MOST_DAMP:
        damped = hessian.double()
        damped.diagonal().add_(damp * mean)
        upper = _backwards(damped) if hessian.is_cuda else _twice(damped)
        if upper is not None and bool(torch.isfinite(upper).all()):
            return upper, damp
        damp = max(damp * 10, 1e-3)
    return None


def _twice(damped: Tensor) -> Tensor | None:
    """U by its definition; None where one of the two factors does not exist."""
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        return None
    inverse = torch.cholesky_inverse(lower)
    del lower  # at 14336 inputs, each of these takes 1.6 GB
    upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
    return None if failed else upper.float()


def _backwards(damped: Tensor) -> Tensor | None:
    """U in less than half of the operations, mostly products: for a GPU.

    With J the matrix that turns an order round and J H J = L L^T, U = J L^-1 J.
    """
    lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if failed:
        return None
    _invert(lower)
    return lower.float().flip(0, 1).contiguous()  # the decomposition gives columns


def _invert(lower: Tensor) -> None:
    """Invert a lower triangular matrix in place, by halves."""
    size = len(lower)
    if size <= SOLVED_WHOLE:
        unit = torch.eye(size, dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, unit, upper=False))
        return
    half = size // 2
    first, second, below = lower[:half, :half], lower[half:, half:], lower[half:, :half]
    _invert(first)
    _invert(second)
    below.copy_((second @ below) @ first).neg_()


def gptq(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    spec: WeightSpec,
    factor: Tensor,
    order: Tensor,
    block_size: int,
) -> Tensor:
    """Quantize a weight with given scales, column by column.

    Args:
        weight: [N, K] float.
        scale: Of the spec's blocks.
        zero_point: Of the spec's blocks; None where the type is symmetric.
        factor: U of the Hessian with its rows and columns in `order` [K, K].
        order: int64 [K], columns in the order in which they are solved.
        block_size: Columns between two updates of the rest.

    Returns:
        q [N, K] in the type's storage, columns as in `weight`.
    """
    kind = numerics.TYPES[spec.dtype]
    columns = weight.T[order].float().contiguous()  # [K, N]: a column is contiguous
    scales = rounding.expanded(scale, weight, spec).T[order].contiguous()
    zeros = (
        None if zero_point is None else rounding.expanded(zero_point, weight, spec).T[order].float()
    )
    solved, size = gptq_columns, block_size
    if columns.is_cuda and kernels.knows(kind):
        solved, size = kernels.gptq_block, min(block_size, kernels.WIDEST)
    for start in range(0, len(order), size):
        block = slice(start, min(start + size, len(order)))
        offset = None if zeros is None else zeros[block]
        errors = solved(columns[block], scales[block], offset, factor[block, block], kind)
        columns[block.stop :].addmm_(factor[block, block.stop :].T, errors, alpha=-1.0)
    restored = torch.empty_like(columns, dtype=kind.storage)
    restored[order] = columns.to(kind.storage)
    return restored.T.contiguous()


def gptq_columns(
    columns: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    factor: Tensor,
    kind: numerics.QuantizedType,
) -> Tensor:
    """Solve a block of columns; `kernels.triton.calibration.feedback.gptq_block` is it for a GPU.

    Args:
        columns: fp32 [B, N]; becomes the values of the type.
        scales: fp32 [B, N].
        zeros: fp32 [B, N], or None.
        factor: fp32 [B, B], the block of U.

    Returns:
        (w - q) / U_jj of each column, fp32 [B, N].
    """
    errors, pivots = torch.empty_like(columns), factor.diagonal().tolist()
    for j, (column, scale) in enumerate(zip(columns, scales, strict=True)):
        offset = None if zeros is None else zeros[j]
        rounded = numerics.round_to(column / scale, kind, offset)
        known = rounded if offset is None else rounded - offset
        error = torch.addcmul(column, known, scale, value=-1.0, out=errors[j])
        error.div_(pivots[j])
        columns[j + 1 :].addr_(factor[j, j + 1 :], error, alpha=-1.0)
        column.copy_(rounded)
    return errors


class GPTQ(LayerMethod):
    """Solves every target layer of a block; see the module's docstring."""

    spec: GPTQSpec
    needs = "statistics"
    moments = "full"

    def solve(self, work: BlockWork) -> None:
        """Solve the layers, those of one input together."""
        self.solved = {}
        for modules in layers_by_input(work).values():
            # experts share one input; their factor is found once
            factor = self._factor(work, next(iter(modules.values()))[0])
            for names in modules.values():
                self.solved |= dict(self._solve(work, names, factor))

    def feedback(self, work: BlockWork) -> Iterator[tuple[str, expected.Feedback]]:
        """Of the layers whose Hessian factors: with G = I in what it makes up for."""
        for modules in layers_by_input(work).values():
            names = [name for own in modules.values() for name in own]
            found, hessian = self._factor(work, names[0]), work.second_moments(names[0])
            if found is None:
                continue
            for name in names:
                inputs, outputs = work.fisher(name).telling
                rows = outputs.diagonal(dim1=1, dim2=2).flatten()
                rows = rows[: len(work.block.linears[name].weight)]
                columns = expected.amplified(found[0], found[1], inputs)
                yield name, expected.Feedback(rows, columns, self.spec.scale, hessian)

    def _solve(
        self, work: BlockWork, names: list[str], factor: tuple[Tensor, Tensor] | None
    ) -> Iterator[tuple[str, QuantizedLinear]]:
        """Layers of one module that read one input, their output channels stacked.

        Such layers are fused at run time, so that they have one scheme. Rounded without a factor.
        """
        hessian, spec = work.second_moments(names[0]), work.weight_spec(names[0])
        weights = [work.block.linears[name].weight for name in names]
        params = [
            rounding.choose_qparams(w, spec, work.scale_dtype(n), self.spec.scale, hessian)
            for n, w in zip(names, weights, strict=True)
        ]
        rounded = [
            numerics.quantize(w, scale, numerics.TYPES[spec.dtype], zeros, spec.block)
            for w, (scale, zeros) in zip(weights, params, strict=True)
        ]
        solved = rounded if factor is None else self._gptq(spec, weights, params, hessian, *factor)
        each = zip(names, weights, params, solved, rounded, strict=True)
        for name, w, (scale, zeros), q, plain in each:
            values = (numerics.dequantize(x, scale, zeros, spec.block) for x in (q, plain))
            ours, theirs = (moments.output_errors(w - v, hessian).sum().item() for v in values)
            if ours > theirs:
                message = f"GPTQ's error {ours:.3g} exceeds {theirs:.3g} of rounding; it is rounded"
                work.report(name, "fallback", message)
                q = plain
            stored = storage.StoredWeight(q, scale, zeros)
            yield name, QuantizedLinear(stored, spec, work.input_scale(name), self.spec.scale)

    def _factor(self, work: BlockWork, name: str) -> tuple[Tensor, Tensor] | None:
        """U of the Hessian of a layer's input, its rows and columns in an order, and that order.

        None where it cannot be factored.
        """
        hessian = work.second_moments(name)
        stand_in = work.observed_for[name]  # it may be found for several parts of the block
        dead = hessian.diagonal() == 0
        hessian = hessian + torch.diag(dead.float())  # an input that is always zero decides nothing
        order = torch.arange(len(hessian), device=hessian.device)
        if self.spec.act_order:
            order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
        found = inverse_factor(hessian[order][:, order], self.spec.damp)
        if found is None:
            message = f"its Hessian cannot be factored with damping up to {MOST_DAMP}; rounded"
            work.report(stand_in, "fallback", message)
            return None
        factor, damp = found
        if damp != self.spec.damp:
            message = f"damping raised from {self.spec.damp:g} to {damp:g} to factor the Hessian"
            work.report(stand_in, "damping_raised", message)
        return factor, order

    def _gptq(
        self,
        spec: WeightSpec,
        weights: list[Tensor],
        params: list[tuple[Tensor, Tensor | None]],
        hessian: Tensor,
        factor: Tensor,
        order: Tensor,
    ) -> list[Tensor]:
        """The integers of each layer."""
        size, sweeps = self.spec.block_size, self.spec.sweeps
        smooth = with_feedback.damped(hessian, self.spec.damp) if sweeps else hessian

        def one(weight: Tensor, scale: Tensor, zeros: Tensor | None) -> Tensor:
            q = gptq(weight, scale, zeros, spec, factor, order, size)
            for _ in range(sweeps):
                q = with_feedback.descend(q, weight, scale, zeros, spec, smooth, order, size)
            return q

        if spec.granularity not in ("per_channel", "group"):  # whose scales are stacked by row
            return [one(w, s, z) for w, (s, z) in zip(weights, params, strict=True)]
        scale = torch.cat([s for s, _ in params])
        zeros = [z for _, z in params if z is not None]
        zero_point = torch.cat(zeros) if zeros else None
        return list(one(torch.cat(weights), scale, zero_point).split([len(w) for w in weights]))
