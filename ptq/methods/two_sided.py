"""Rounding against the model's KL: what rounds a weight's element is made up for on both sides.

GPTQ (Frantar et al. 2022, arXiv 2210.17323) lowers the error of a layer's output, tr(E H E^T) with
E = W - Q. Here it is what the error costs the model, to second order (`calibrate.gradients`, after
Martens and Grosse 2015, arXiv 1503.05671),

    KL = 1/2 tr(E^T G E A),        A of the layer's inputs, G of the gradients at its outputs.

Optimal Brain Quantization over all elements of W [N, K], in the order of columns and of rows within
a column, needs the upper Cholesky factor of the inverse of A x G, which is the product of those of
A and G: U_A^T U_A = (A + lambda_A I)^-1, U_G^T U_G = (G + lambda_G I)^-1. For element (i, j)

    e_ij = (w_ij - q_ij) / (U_G[i,i] U_A[j,j])
    w_lk -= U_G[i,l] e_ij U_A[j,k]      for all l >= i, k >= j but itself

so that E = U_G^T (e) U_A and the cost is the sum of e_ij^2 / 2. With G = I it is GPTQ, its inputs
weighted by |g_t|^2. YAQA (Tseng et al. 2025, "Model-Preserving Adaptive Rounding", arXiv
2505.22988) is the published relative: LDLQ with feedback on both sides. `kernels.feedback` walks
the elements.

Columns go by falling diagonal of A and rows by falling diagonal of G (`act_order`); scales are
chosen before, with A for the second moments of the inputs, where they stand in the checkpoint. A G
that is known by diagonal blocks is solved block by block of rows. `sweeps` of descent in the same
metric may follow: scales of rows are fitted to the integers (`ptq.methods.common.with_feedback`),
then each element goes, given all others, to the value of the grid next to
q_ij + (G E A)_ij / (G_ii A_jj). A sweep takes N K steps that wait for each other: as long as the
solution itself on a CPU, far longer on a GPU. Weights of Q4_K, w = s q - m, are solved as W + m,
and sweeps fit s and then m on their grid (`ptq.methods.common.super_blocks`).

Each factor that does not invert has its damping raised tenfold until it does: a reported event. A
layer whose cost is not below that of GPTQ with the same A (G = I) keeps GPTQ's result; one whose
factors are zero or never invert (an expert that got no token) is rounded to the nearest: events
too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from formats.namespace import later
from formats.scheme import WeightSpec
from ptq.methods.common.block import BlockWork, QuantizedLinear
from ptq.methods.common.method import LayerMethod
from ptq.methods.common.spec import FLOAT, BlockSizes, MethodSpec, PlannedLayer, ScaleSearch, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from calibrate.gradients import FisherFactors
    from formats.stored.weights import StoredWeight
    from ptq.methods.common.super_blocks import Storable
with later():
    import torch

    import kernels.feedback as feedback
    import kernels.numerics as numerics
    import kernels.triton.calibration.feedback as triton_feedback
    from calibrate import gradients
    from formats.stored import weights as storage
    from ptq.methods import gptq
    from ptq.methods.common import rounding, super_blocks, with_feedback
    from ptq.methods.common import with_feedback as expected

Damping = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]


class TwoSidedSpec(MethodSpec):
    """Rounding against the model's KL: GPTQ whose errors later columns and later rows compensate.

    It needs gradients: the model runs backward once over the calibration samples.

    YAML::

        two_sided:
          scale: output_mse       # as of rtn, inputs weighted by the gradients of their tokens
          act_order: true         # important columns and rows first; leaves no trace on disk
          damp: 0.01              # share of A's mean diagonal that is added to it
          damp_outputs: 0.5       # the same of G
          sweeps: 0               # of descent over scales and integers afterwards
    """

    stage: ClassVar = Stage.ROUND
    makes_super_blocks: ClassVar = True
    name: Literal["two_sided"] = "two_sided"
    scale: ScaleSearch = "output_mse"
    """How scales are chosen before rounding, as of `rtn`, each token's input weighted by its
    gradient.
    """
    act_order: bool = True
    """Important columns and rows first: more accurate, without a trace on disk."""
    damp: Damping = 0.01
    """Share of the mean diagonal that is added to the factor of the inputs. It matters little; a
    factor that cannot be inverted raises it by itself.
    """
    damp_outputs: Damping = 0.5
    """The same of the factor of the outputs."""
    sweeps: Annotated[int, Field(ge=0)] = 0
    """Rounds of descent over scales and integers afterwards: 2 gain a little in about the time of
    the solution on a CPU; on a GPU each takes far longer than that.
    """

    def algorithm(self) -> TwoSided:
        """Solves the layers of a block."""
        return TwoSided(self)

    def explain(self, layer: PlannedLayer) -> Iterator[str]:
        """In which order the layer is solved."""
        order = "important columns and rows first" if self.act_order else "in order"
        sweeps = f", {self.sweeps} sweeps of descent after it" if self.sweeps else ""
        yield f"two_sided: solved against the model's KL, {order}, scales by {self.scale}{sweeps}"

    def memory(self, block: BlockSizes) -> int:
        """Integers, a weight with its scales, errors and products, and factors in fp32 and fp64."""
        return block.elements + 8 * FLOAT * block.largest + (3 * FLOAT + 4 * 8) * block.widest**2


@dataclass(frozen=True)
class Side:
    """One factor, ready for use, in the order in which its rows (or columns) are taken.

    Attributes:
        order: int64 [n].
        factor: U, fp32 [n, n]: U^T U is the inverse of the damped matrix.
        damped: The damped matrix itself, fp32 [n, n].
        damp: Share of the mean diagonal that was needed.
    """

    order: Tensor
    factor: Tensor
    damped: Tensor
    damp: float

    @classmethod
    def of(cls, matrix: Tensor, damp: float, *, act_order: bool) -> Side | None:
        """Invert a factor [n, n]; None where it is zero, or no damping up to 10 helps."""
        diagonal = matrix.diagonal()
        if not bool((diagonal > 0).any()):
            return None
        matrix = matrix + torch.diag((diagonal == 0) * diagonal.mean())  # which decide nothing
        order = torch.arange(len(matrix), device=matrix.device)
        if act_order:
            order = torch.argsort(matrix.diagonal(), descending=True, stable=True)
        ordered = matrix[order][:, order]
        found = gptq.inverse_factor(ordered, damp)
        if found is None:
            return None
        return cls(order, found[0], with_feedback.damped(ordered, found[1]), found[1])


@dataclass(frozen=True)
class Layer:
    """A weight that is to be rounded, with its scales and the order of its columns.

    Attributes:
        weight: fp32 [N, K].
        dtype: How its scales are stored.
        stored: Rounded to the nearest; what methods here return has its zero points, and its scales
            where these are not fitted.
        inputs: A, ready for use.
    """

    weight: Tensor
    spec: WeightSpec
    dtype: numerics.ScaleStorage
    stored: StoredWeight
    inputs: Side

    def dequantized(self, stored: StoredWeight) -> Tensor:
        """What is multiplied, fp32 [N, K]."""
        return numerics.dequantize(stored.q, stored.scale, stored.zero_point, self.spec.block)

    def one_sided(self) -> StoredWeight:
        """By GPTQ, with A in place of H."""
        scale, zeros, side = self.stored.scale, self.stored.zero_point, self.inputs
        weight, offset = self.weight, zeros
        if zeros is not None and self.spec.float_zeros:
            weight, offset = weight + self._each(scale * zeros), None
        q = gptq.gptq(weight, scale, offset, self.spec, side.factor, side.order, 128)
        return storage.StoredWeight(q, scale, zeros)

    def two_sided(self, outputs: Sequence[Side], sweeps: int) -> StoredWeight:
        """Against both factors.

        Args:
            outputs: Diagonal blocks of G, of one size, ready for use: N rows, the last filled up.
            sweeps: Of descent afterwards.
        """
        taken = Taken.of(self.inputs.order, outputs, len(self.weight))
        weights, now = taken.take(self.weight.float()), self._start(taken)
        kernels = triton_feedback if weights.is_cuda else feedback
        factors = torch.stack([side.factor for side in outputs])
        q = kernels.round_all(weights + now.low, now.to, factors, self.inputs.factor)
        damped = torch.stack([side.damped for side in outputs]) if sweeps else factors
        for _ in range(sweeps):
            if self._fits:
                now = self._fitted(weights, q, now, taken, damped)
            values = now.to.values(q)
            gradient = self.inputs.damped @ (weights + now.low - values) @ damped
            q = kernels.move_all(gradient, values, now.to, damped, self.inputs.damped)
        q = taken.back(q) - (super_blocks.MIDDLE if self.spec.super_blocks else 0)
        storage_type = numerics.TYPES[self.spec.dtype].storage
        return storage.StoredWeight(q.to(storage_type), now.scale, now.zeros)

    def _each(self, x: Tensor) -> Tensor:
        """One number of each block for each element."""
        return rounding.expanded(x.float(), self.weight, self.spec)

    def _start(self, taken: Taken) -> Scaled:
        """The scales that were chosen for rounding to the nearest."""
        spec, scale, zeros = self.spec, self.stored.scale, self.stored.zero_point
        grid, offset = feedback.Grid.of(numerics.TYPES[spec.dtype]), None
        low = torch.zeros((), device=scale.device)
        if zeros is not None and spec.super_blocks:
            low = taken.take(self._each(super_blocks.minima(scale, zeros)))
            grid = feedback.Grid(0, super_blocks.STEPS)
        elif zeros is not None:
            offset = taken.take(self._each(zeros))
        to = feedback.Rounding(grid, taken.take(self._each(scale), 1.0), offset)
        return Scaled(to, low, scale, zeros)

    @property
    def _fits(self) -> bool:
        """Whether scales are free to be fitted: floats, each of one row."""
        spec = self.spec
        free = spec.super_blocks or not spec.two_level
        return spec.block[0] == 1 and spec.scale_type == "float" and free

    def _fitted(
        self, weights: Tensor, q: Tensor, now: Scaled, taken: Taken, damped: Tensor
    ) -> Scaled:
        """Scales that suit the integers best, and then minima."""
        size, to, spec = self.spec.block[1], now.to, self.spec
        group_of = taken.columns // (self.weight.shape[1] if size == -1 else size)
        of_scales, of_minima = self._storable(taken)

        def fit(weights: Tensor, q: Tensor, found: Tensor, storable: Storable) -> Tensor:
            start, own = taken.take_rows(found, 1.0), self.inputs.damped
            return with_feedback.fit_scales(weights, q, start, group_of, damped, own, storable)

        steps = q if to.zeros is None else q - to.zeros
        scale = fit(weights + now.low, steps, now.scale, of_scales)
        to = feedback.Rounding(to.grid, scale[:, group_of].contiguous(), to.zeros)
        scale = taken.rows_back(scale)
        if now.zeros is None or not spec.super_blocks:
            return Scaled(to, now.low, scale, now.zeros)
        least = super_blocks.minima(now.scale, now.zeros)
        least = fit(weights - to.values(q), -torch.ones_like(q), least, of_minima)
        stored = super_blocks.with_zeros(scale, taken.rows_back(least))
        return Scaled(to, least[:, group_of], *stored)

    def _storable(self, taken: Taken) -> tuple[Storable, Storable]:
        """What rounds scales, and minima, of a group to those that the checkpoint holds."""
        dtype, zeros = self.dtype, self.stored.zero_point
        if zeros is None or not self.spec.super_blocks:
            assert isinstance(dtype, torch.dtype)
            return (lambda s, _: rounding.storable(s, dtype), lambda m, _: m)
        d, e = (taken.take_rows(x, 1.0) for x in super_blocks.units(self.stored.scale, zeros))
        return super_blocks.multiples(d, 1), super_blocks.multiples(e, 0)


@dataclass(frozen=True)
class Scaled:
    """Scales of a weight, w = q s or q s - m, as rounding goes by them and as they are stored.

    Attributes:
        to: What elements are rounded to, in the order of solving.
        low: m of each element, fp32 [blocks, K, rows]; one zero where there is none.
        scale: As the checkpoint holds them, one for each of the spec's blocks.
        zeros: Zero points likewise; None where the type is symmetric.
    """

    to: feedback.Rounding
    low: Tensor
    scale: Tensor
    zeros: Tensor | None


@dataclass(frozen=True)
class Taken:
    """Rows and columns of a matrix [N, K] in the order of solving: [blocks, K, rows], transposed.

    Attributes:
        rows: int64 [blocks, rows]; those from N on are filled up.
        columns: int64 [K].
        height: N.
    """

    rows: Tensor
    columns: Tensor
    height: int

    @classmethod
    def of(cls, columns: Tensor, outputs: Sequence[Side], height: int) -> Taken:
        """As the factors have it."""
        orders = torch.stack([side.order for side in outputs])
        starts = orders.shape[1] * torch.arange(len(orders), device=orders.device)
        return cls(orders + starts[:, None], columns, height)

    def take(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """[N, K] in this order, rows that there are not with a number of their own."""
        return self.take_rows(x, fill)[:, self.columns].contiguous()

    def take_rows(self, x: Tensor, fill: float) -> Tensor:
        """[blocks, n, rows] of [N, n], whose rows alone are taken in this order."""
        filled = torch.nn.functional.pad(x, (0, 0, 0, self.rows.numel() - self.height), value=fill)
        return filled[self.rows].mT

    def back(self, x: Tensor) -> Tensor:
        """Inverse of `take`."""
        restored = torch.empty_like(x)
        restored[:, self.columns] = x
        return self.rows_back(restored)

    def rows_back(self, x: Tensor) -> Tensor:
        """[N, n] of [blocks, n, rows], whose rows alone are out of order."""
        restored = x.new_empty(self.rows.numel(), x.shape[1])
        restored[self.rows.flatten()] = x.mT.flatten(0, 1)
        return restored[: self.height]


class TwoSided(LayerMethod):
    """Solves every target layer of a block; see the module's docstring."""

    spec: TwoSidedSpec
    needs = "statistics"
    gradients = True

    def solve(self, work: BlockWork) -> None:
        """Solve the layers one by one: each has factors of its own."""
        self.solved = {name: self._solve(work, name) for name in work.targets}

    def _solve(self, work: BlockWork, name: str) -> QuantizedLinear:
        weight, spec = work.block.linears[name].weight, work.weight_spec(name)
        factors, statistic = work.fisher(name), self.spec.scale
        inputs = self._side(work, name, "inputs", factors.inputs, self.spec.damp)
        outputs = self._outputs(work, name, factors)
        if inputs is None or outputs is None:
            message = "the loss does not depend on it, or its factors do not invert; it is rounded"
            work.report(name, "fallback", message)
            stored = rounding.round_weight(weight, spec, work.scale_dtype(name))
            return QuantizedLinear(stored, spec, work.input_scale(name))
        dtype = work.scale_dtype(name)
        nearest = rounding.round_weight(weight, spec, dtype, statistic, factors.inputs)
        layer = Layer(weight, spec, dtype, nearest, inputs)
        stored, plain = layer.two_sided(outputs, self.spec.sweeps), layer.one_sided()
        ours, theirs = (factors.kl(weight - layer.dequantized(x)).item() for x in (stored, plain))
        if not ours < theirs:
            message = f"its KL {ours:.3g} is not below {theirs:.3g} of GPTQ, whose result it keeps"
            work.report(name, "fallback", message)
            stored = plain
        return QuantizedLinear(stored, spec, work.input_scale(name), statistic)

    def feedback(self, work: BlockWork) -> Iterator[tuple[str, expected.Feedback]]:
        """Of the layers whose factors invert."""
        for name in work.targets:
            factors, height = work.fisher(name), len(work.block.linears[name].weight)
            side = self._side(work, name, "inputs", factors.inputs, self.spec.damp)
            sides = self._outputs(work, name, factors)
            if side is None or sides is None:
                continue
            inputs, outputs = factors.telling
            if len(outputs) < len(sides):  # a whole one, of which its diagonal blocks are read
                outputs = gradients.diagonal_blocks(outputs[0], factors.outputs.shape[1])
            amplified = expected.amplified
            rows = [amplified(s.factor, s.order, g) for s, g in zip(sides, outputs, strict=True)]
            columns = amplified(side.factor, side.order, inputs)
            found = torch.cat(rows)[:height]
            yield name, expected.Feedback(found, columns, self.spec.scale, factors.inputs)

    def _outputs(self, work: BlockWork, name: str, factors: FisherFactors) -> list[Side] | None:
        """Every diagonal block of G; None where one of them cannot be used."""
        damp, found = self.spec.damp_outputs, []
        for block in factors.outputs:
            side = self._side(work, name, "outputs", block, damp)
            if side is None:
                return None
            found.append(side)
        return found

    def _side(
        self, work: BlockWork, name: str, of: str, matrix: Tensor, damp: float
    ) -> Side | None:
        side = Side.of(matrix, damp, act_order=self.spec.act_order)
        if side is not None and side.damp != damp:
            message = f"damping raised from {damp:g} to {side.damp:g} to invert the factor of {of}"
            work.report(name, "damping_raised", message)
        return side
