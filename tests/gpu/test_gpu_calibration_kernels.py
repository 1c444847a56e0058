"""What a GPU sees and solves in single kernels, against the CPU."""

from __future__ import annotations

import pytest
import torch

from calibrate.tensor_statistics import TensorStatistics
from formats.errors import RecipeError
from formats.scheme import WeightSpec
from kernels.numerics import TYPES, dequantize, quantize
from ptq.methods.common import rounding
from ptq.methods.common.moments import output_errors
from ptq.methods.common.with_feedback import damped, descend
from ptq.methods.gptq import gptq, inverse_factor
from tests.calibrate.test_observers import observed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
W4 = WeightSpec(dtype="int4", granularity="group", group_size=128)
SPECS = (
    W4,
    W4.model_copy(update={"symmetric": False}),
    W4.model_copy(update={"two_level": True}),
    WeightSpec(),
    WeightSpec(dtype="fp8_e4m3", granularity="block"),
)


@pytest.mark.parametrize("shape", [(14336,), (8, 128), (3, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_of_a_gpu_are_those_of_the_cpu_bit_for_bit(shape, dtype):
    seen = [TensorStatistics(shape), TensorStatistics(shape)]
    for sample in range(3):
        torch.manual_seed(sample)
        x = torch.randn(300 + sample, *shape).to(dtype)
        x[::7] *= 100
        x[5] = 0
        seen[0].merge(observed(x))
        heads = x.cuda()
        if len(shape) == 2:  # as attention hands them over
            heads = heads.transpose(0, 1).contiguous().transpose(0, 1)
        seen[1].merge(observed(heads))
    assert seen[0] == seen[1]
    x[3, ..., 1] = float("nan")
    with pytest.raises(RecipeError, match="NaN or infinity"):
        observed(x.cuda())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
def test_a_gpu_solves_columns_as_the_cpu(spec):
    torch.manual_seed(0)
    weight, x = torch.randn(384, 512), torch.randn(2000, 512) @ torch.randn(512, 512)
    hessian = x.T @ x / len(x)
    order = hessian.diagonal().argsort(descending=True)
    found = []
    for device in ("cpu", "cuda"):
        w, h, o = (t.to(device) for t in (weight, hessian, order))
        scale, zeros = rounding.choose_qparams(w, spec, torch.float32, "output_mse", h)
        factor = inverse_factor(h[o][:, o], 0.01)
        assert factor is not None
        q = gptq(w, scale, zeros, spec, factor[0], o, 128)
        better = descend(q, w, scale, zeros, spec, damped(h, 0.01), o, 128)
        plain = quantize(w, scale, TYPES[spec.dtype], zeros, spec.block)
        errors = [
            output_errors(w - dequantize(a, scale, zeros, spec.block), h).sum().item()
            for a in (plain, q, better)
        ]
        found.append((scale.cpu(), factor[0].cpu(), errors))
    (scales, factors, errors) = zip(*found, strict=True)
    assert (scales[0] == scales[1]).float().mean() > 0.95  # TF32 judges candidates alike
    assert torch.allclose(factors[0], factors[1], rtol=1e-3, atol=1e-4 * factors[0].max().item())
    assert errors[1] == pytest.approx(errors[0], rel=0.03)
    assert errors[1][2] <= errors[1][1] < errors[1][0]


def test_a_large_factor_is_that_of_the_inverse():
    torch.manual_seed(0)
    x = torch.randn(8000, 3000, device="cuda", dtype=torch.float64)
    hessian = (x.T @ x / len(x)).float()
    found = inverse_factor(hessian, 0.01)
    assert found is not None
    upper = found[0].double()
    assert torch.equal(upper, upper.triu())
    exact = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(3000).cuda()
    assert torch.allclose(upper.T @ upper @ exact, torch.eye(3000).cuda().double(), atol=1e-4)
