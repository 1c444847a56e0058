"""HQQ: zero points and scales that leave a sparse error, found from the weights alone.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (Mobius Labs, 2023).
For each block of weights W (a group, a channel) that shares a scale s and a zero point z,

    min over z, s of phi(W - Q^-1(Q(W))),    Q(W) = round(W / s + z),    Q^-1(W_q) = s (W_q - z)

with phi the l_p norm, p < 1: unlike a square it forgives a few large errors, those of outliers, for
the sake of all others. Half-quadratic splitting gives the error a variable W_e of its own,

    min over z, s, W_e of phi(W_e) + beta / 2 ||W_e - (W - Q^-1(Q(W)))||^2

and minimizes over one variable after the other, while beta grows by kappa each time:

    W_e <- shrink(W - Q^-1(W_q), beta),   shrink(x, beta) = sign(x) relu(|x| - |x|^(p-1) / beta)
    z   <- <W_q - (W - W_e) / s>                                    the mean over the block
    s   <- <W - W_e, W_q - z> / <W_q - z, W_q - z>                  least squares

The paper keeps s; here it moves as well, which is all there is to move where the type is symmetric
(z = 0). Errors are measured in steps, W / s: then beta means the same for every block. Zero points
are stored as integers and scales in the checkpoint's type; of all steps, and of the largest
magnitude's scale before them, each block keeps what has the least phi as it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from formats.namespace import later
from formats.scheme import LayerScheme, Scheme, WeightSpec
from ptq.methods.common.block import BlockWork, QuantizedLinear
from ptq.methods.common.method import LayerMethod
from ptq.methods.common.spec import FLOAT, BlockSizes, MethodSpec, PlannedLayer, Stage

if TYPE_CHECKING:
    from torch import Tensor
with later():
    import torch

    import kernels.numerics as numerics
    import kernels.two_level as two_level
    from formats.stored import weights as storage
    from ptq.methods.common import rounding


class HQQSpec(MethodSpec):
    """HQQ: integer weights whose zero points and scales are solved without data.

    YAML::

        hqq:
          p: 0.7                  # of the norm of the error; 1 would forgive outliers nothing
          beta: 10.0              # weight of the split at first
          kappa: 1.01             # by which it grows each time
          iterations: 20
    """

    stage: ClassVar = Stage.ROUND
    name: Literal["hqq"] = "hqq"
    p: Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)] = 0.7
    """Exponent of the error's norm: a smaller one tolerates more a few large errors."""
    beta: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 10.0
    """First weight of the split."""
    kappa: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 1.01
    """Factor by which that weight grows each round."""
    iterations: Annotated[int, Field(ge=1)] = 20
    """Rounds of the search; its time grows in proportion."""

    def misfit(self, scheme: Scheme, layers: Sequence[LayerScheme]) -> str | None:
        """It needs integer weights everywhere."""
        if all(layer.weights is None or layer.weights.dtype != "fp8_e4m3" for layer in layers):
            return None
        return "hqq moves zero points and scales of integers; it is not for fp8 weights"

    def algorithm(self) -> HQQ:
        """Solves the layers of a block."""
        return HQQ(self)

    def explain(self, layer: PlannedLayer) -> Iterator[str]:
        """What of the layer's rounding is moved."""
        symmetric = layer.scheme.weights is not None and layer.scheme.weights.symmetric
        moved = "scales" if symmetric else "zero points and scales"
        yield f"hqq: rounded, {moved} by {self.iterations} half-quadratic steps"

    def memory(self, block: BlockSizes) -> int:
        """Integers, and a layer's steps, integers and errors in fp32."""
        return block.elements + 6 * FLOAT * block.largest


def shrink(x: Tensor, beta: float, p: float) -> Tensor:
    """The W_e of least |W_e|^p + beta / 2 (W_e - x)^2 for each x, nearly; 0 where x is 0."""
    magnitude = x.abs()
    return x.sign() * (magnitude - magnitude.pow(p - 1) / beta).clamp(min=0)


def half_quadratic(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    spec: WeightSpec,
    dtype: torch.dtype,
    options: HQQSpec,
) -> tuple[Tensor, Tensor | None]:
    """Improve on the scale and the zero point of each block of a weight.

    Args:
        weight: [out, in], float.
        scale: fp32, of the spec's blocks [out, groups].
        zero_point: Of the same shape, in the type's storage; None where the type is symmetric.
        spec: How the weight is stored: integers per channel or in groups.
        dtype: Type in which the scales are stored.
        options: p, beta, kappa and iterations.

    Returns:
        Scale and zero point, like those given.
    """
    kind = numerics.TYPES[spec.dtype]
    w = numerics.block_view(weight.float(), spec.block).squeeze(1)  # [out, groups, group]
    s = scale[..., None]
    z = torch.zeros_like(s) if zero_point is None else zero_point.float()[..., None]

    def rounded(s: Tensor, z: Tensor) -> Tensor:
        return (w / s + z).round_().clamp_(kind.q_min, kind.q_max)

    def phi(s: Tensor, z: Tensor) -> Tensor:
        return (w - s * (rounded(s, z) - z)).abs_().pow_(options.p).sum(dim=-1, keepdim=True)

    best, least, beta = (s, z), phi(s, z), options.beta
    for _ in range(options.iterations):
        q = rounded(s, z)
        w_e = shrink(w / s - (q - z), beta, options.p)
        wanted = w / s - w_e  # (W - W_e) / s
        if zero_point is not None:
            z = (q - wanted).mean(dim=-1, keepdim=True).clamp(kind.q_min, kind.q_max)
        levels = q - z
        power = levels.square().sum(dim=-1, keepdim=True)
        change = (wanted * levels).sum(dim=-1, keepdim=True) / power
        s = torch.where((power > 0) & (change > 0), s * change, s)
        stored = rounding.storable(s, dtype), z.round()
        found = phi(*stored)
        best = tuple(
            torch.where(found < least, new, old) for new, old in zip(stored, best, strict=True)
        )
        least, beta = torch.minimum(least, found), beta * options.kappa
    scale, zeros = (x[..., 0] for x in best)
    return scale, None if zero_point is None else zeros.to(kind.storage)


class HQQ(LayerMethod):
    """Hands over every target layer of a block, rounded; see the module's docstring."""

    spec: HQQSpec
    needs = "weights"

    def solve(self, work: BlockWork) -> None:
        """Solve the layers one by one."""
        self.solved = {name: self._layer(work, name) for name in work.targets}

    def _layer(self, work: BlockWork, name: str) -> QuantizedLinear:
        weight, spec = work.block.linears[name].weight, work.weight_spec(name)
        plain, dtype = spec.model_copy(update={"two_level": False}), work.scale_dtype(name)
        assert isinstance(dtype, torch.dtype)
        start = rounding.choose_qparams(weight, plain, dtype)
        scale, zeros = half_quadratic(weight, *start, plain, dtype, self.spec)
        if spec.two_level:
            unit = two_level.choose_unit(scale)
            scale = two_level.nearest_multiples(scale, unit) * unit
        q = numerics.quantize(weight, scale, numerics.TYPES[spec.dtype], zeros, spec.block)
        stored = storage.StoredWeight(q, scale, zeros)
        return QuantizedLinear(stored, spec, work.input_scale(name), "half-quadratic")
