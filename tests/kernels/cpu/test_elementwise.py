"""Row-wise ops against their twins, and the registration of every op with torch."""

from __future__ import annotations

import pytest
import torch

import kernels.reference as reference
from kernels.cpu import native
from kernels.ops import apply_rope, rms_norm, silu_mul
from kernels.weights import pack_quantized_weight


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("size", [64, 288, 4544])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(size, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(40, size).to(dtype), torch.randn(size).to(dtype)
    got = rms_norm(x, weight, 1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        got, reference.rms_norm(x, weight, 1e-5), rtol=tolerance, atol=tolerance
    )
    assert all(torch.equal(rms_norm(x[i : i + 1], weight, 1e-5)[0], got[i]) for i in range(40))


@pytest.mark.usefixtures("backend")
def test_silu_mul_is_the_same_wherever_an_element_lies():
    torch.manual_seed(0)
    gate, up = torch.randn(37, 301) * 20, torch.randn(37, 301)
    got = silu_mul(gate, up)
    torch.testing.assert_close(got, reference.silu_mul(gate, up), rtol=1e-6, atol=1e-6)
    for count in (1, 2, 3, 7):
        assert torch.equal(silu_mul(gate[5 : 5 + count], up[5 : 5 + count]), got[5 : 5 + count])
    extreme = silu_mul(torch.tensor([[-1e4, 1e4, 0.0]]), torch.ones(1, 3))
    assert extreme.tolist() == [[0.0, 1e4, 0.0]]


@pytest.mark.usefixtures("backend")
def test_rope():
    torch.manual_seed(0)
    q, k = torch.randn(7, 4, 32), torch.randn(7, 2, 32)
    angle = torch.outer(torch.arange(7.0), 1e4 ** (-torch.arange(16) / 16)).repeat(1, 2)
    got = apply_rope(q, k, angle.cos(), angle.sin())
    want = reference.apply_rope(q, k, angle.cos(), angle.sin())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[0].norm(dim=-1), q.norm(dim=-1))


def cases():
    torch.manual_seed(0)
    ops = torch.ops.ptq
    q8 = torch.randint(-127, 128, (5, 64), dtype=torch.int8)
    scale = torch.tensor(0.02)
    pool = torch.zeros(3, 2, 64, 16, dtype=torch.int8)
    heads = torch.tensor([0.1, 0.2])
    rows = torch.randn(5, 2, 16)
    table, start, context = torch.tensor([[1, 2]]), torch.tensor([0, 5]), torch.tensor([70])
    yield ops.quantize_static, (torch.randn(5, 64), scale)
    yield ops.quantize_per_token, (torch.randn(5, 64),)
    int8 = (q8, scale, torch.randn(8, 64), torch.rand(8), None, torch.bfloat16)
    yield ops.int8_linear, int8
    yield ops.fake_quantize_fp8, (torch.randn(5, 64), None, -1)
    if native.library() is not None:
        packed = pack_quantized_weight(q8, torch.ones(5, 1), "int8").packed
        yield ops.packed_linear, (q8, packed, scale, 5, torch.bfloat16)
        yield ops.packed_linear, (torch.randn(3, 64), packed, None, 5, torch.float32)
    yield ops.float_linear, (torch.randn(5, 64), torch.randn(8, 64), torch.randn(8))
    yield ops.rms_norm, (torch.randn(5, 64), torch.randn(64), 1e-5)
    yield ops.silu_mul, (torch.randn(5, 64), torch.randn(5, 64))
    yield ops.apply_rope, (rows, rows, torch.randn(5, 16), torch.randn(5, 16))
    slots = torch.arange(70, 75)
    yield ops.write_kv, (rows, rows, pool, pool.clone(), slots, heads, heads, False)
    args = (rows, pool, pool.clone(), table, start, context, heads, heads, 0.25, None)
    yield ops.paged_attention, args


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case[0].__name__)
def test_registration(case):
    op, arguments = case
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(op.default, arguments, test_utils=checks)
