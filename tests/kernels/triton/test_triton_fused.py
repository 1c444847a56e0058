"""Fused rows in Triton's interpreter against their twins."""

import pytest
import torch

import kernels.triton.reference as twins
from kernels.op_inputs import Clamped
from kernels.triton import common, fused
from kernels.triton.fused import add_rms_norm, gated_product, quantize_rows
from kernels.triton.norms import norm_projections
from kernels.triton.sampling.logits import softcap_logits
from tests.kernels.triton_lab import interpreted
from tests.refusals import refused


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
@pytest.mark.parametrize("add", [False, True])
@interpreted
def test_fused_rows(static, dtype, add):
    if static and dtype != torch.int8:
        refused("take no scale", fused.gated_product, random(2, 8), torch.ones(1), dtype)
        return
    x, other, weight, gate_up = random(5, 200), random(5, 201)[:, 1:], random(200), random(5, 400)
    x[2], gate_up[2] = 0, 0
    other = other.contiguous() if add else None
    scale = torch.tensor([0.01]) if static else None  # small enough to clamp
    sums = [f.add_rms_norm(x, other, weight, 1e-5, scale, dtype) for f in (fused, twins)]
    products = [f.gated_product(gate_up, scale, dtype) for f in (fused, twins)]
    for got, wanted in (sums, products):
        assert got[0].dtype == dtype
        torch.testing.assert_close(got[0].float(), wanted[0].float(), rtol=1e-5, atol=1e-6)
        if wanted[1] is None:
            assert got[1] is None
        else:
            torch.testing.assert_close(got[1], wanted[1], rtol=1e-6, atol=0)
    assert torch.equal(sums[0][2], sums[1][2])
    if static:
        assert sums[0][0].abs().max() == 127


@pytest.mark.parametrize(
    ("dtype", "scaled", "group"),
    [
        (torch.int8, "static", None),
        (torch.int8, "row", None),
        (torch.float8_e4m3fn, "row", 128),
        (torch.float16, "none", None),
    ],
)
@pytest.mark.parametrize(("size", "length"), [(200, 256), (20, 128), (960, 1024), (2880, 2944)])
@interpreted
def test_rows_are_stored_longer_with_zeros_behind_them(size, length, dtype, scaled, group):
    """Whatever ends in rows gives those of the same size, filled up; memory starts as ones."""
    x, weight, gate_up = random(3, size), random(size), random(3, 2 * size)
    scale = torch.tensor([0.01]) if scaled == "static" else None
    ones = lambda *shape, **kind: torch.ones(*shape, **kind)  # noqa: E731
    for call in (
        lambda n: fused.quantize_rows(x, scale, dtype, group, length=n),
        lambda n: fused.gated_product(gate_up, scale, dtype, group, length=n),
        lambda n: fused.add_rms_norm(x, x, weight, 1e-5, scale, dtype, group, length=n),
        lambda n: fused.add_rms_norm(x, None, None, 1e-5, scale, dtype, group, length=n),
    ):
        short, scales, *total = call(None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused.torch, "empty", ones)
            found, own, *sums = call(length)
        assert found.shape == (3, length)
        found, short = found.float(), short.float()
        assert torch.equal(found[:, :size], short)
        assert not found[:, size:].any()
        assert (own is None) == (scales is None)
        assert own is None or torch.equal(own, scales)
        assert all(torch.equal(a, b) for a, b in zip(sums, total, strict=True))
    with pytest.raises(ValueError, match=f"rows of {size} do not fit in {size - 8} elements"):
        fused.quantize_rows(x, scale, dtype, group, length=size - 8)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.float16])
@pytest.mark.parametrize("norms", ["both", "after", "none"])
@interpreted
def test_what_a_layer_adds_is_normed_first(norms, dtype):
    """Rows that are not normed again are the sum, or that quantized."""
    x, residual, one, other = (random(5, 200 + i)[:, i:].contiguous() for i in range(4))
    x[1] = 0
    after = None if norms == "none" else 1 + one[0].float()
    weight = other[0].float() if norms == "both" else None
    first = fused.add_rms_norm(x, None, None, 1e-5, None, dtype)
    assert first[2] is x
    assert (first[0] is x) == (dtype == x.dtype)
    got, wanted = (
        f.add_rms_norm(x, residual, weight, 1e-5, None, dtype, after=after) for f in (fused, twins)
    )
    torch.testing.assert_close(got[2], wanted[2], rtol=1e-3, atol=1e-4)
    if dtype == torch.int8:
        torch.testing.assert_close(got[1], wanted[1], rtol=2e-3, atol=0)
        assert (got[0].int() - wanted[0].int()).abs().max() <= 1
    else:
        torch.testing.assert_close(got[0], wanted[0], rtol=2e-3, atol=2e-3)
    assert (got[0] is got[2]) == (weight is None and dtype == torch.float16)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", Clamped(1.702, 1.0)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
@interpreted
def test_products_of_activations(activation, dtype):
    gate_up = random(3, 400)
    gate_up[0, :6] = torch.tensor([-6e4, 6e4, -9.0, 9.0, 0.0, -0.5])
    got, wanted = (
        f.gated_product(gate_up, None, dtype, activation=activation) for f in (fused, twins)
    )
    assert (got[0].float() - wanted[0].float()).abs().max() <= (1 if dtype == torch.int8 else 0.3)
    torch.testing.assert_close(got[0][1:].float(), wanted[0][1:].float(), rtol=1e-4, atol=1e-5)


@interpreted
def test_norms_of_whole_projections_and_bounded_logits():
    qkv, q_norm, k_norm = random(3, 96 + 48 + 48), random(96) + 1, random(48).float() + 1
    wanted = twins.norm_projections(qkv, q_norm, k_norm, 1e-5)
    got = norm_projections(qkv, q_norm, k_norm, 1e-5)
    assert got is qkv
    torch.testing.assert_close(got, wanted, rtol=2e-3, atol=1e-4)
    refused("qkv is", norm_projections, qkv[:, :100], q_norm, k_norm, 1e-5)
    logits = torch.randn(3, 5000) * 40
    logits[1, 2], logits[2, 0] = float("nan"), 1e30
    wanted = 30 * torch.tanh(logits / 30)
    torch.testing.assert_close(softcap_logits(logits, 30.0), wanted, equal_nan=True)
    refused("needed is fp32", softcap_logits, logits.half(), 30.0)


@pytest.mark.parametrize("size", [200, 384, 40])
@pytest.mark.parametrize(("dtype", "group"), [("int8", None), ("float8_e4m3fn", 128)])
@interpreted
def test_plain_rows_equal_their_twin_bit_for_bit(size, dtype, group):
    """With the types that the interpreter has; e4m3 as bits too, as devices before Ada take it."""
    dtype, x = getattr(torch, dtype), random(9, size).float() * 3
    x[2], x[3, 130:] = 0, 0
    x[4] = torch.logspace(-9, 3, size)
    assert fused.quantize_rows(x[:0], None, dtype, group)[0].shape == (0, size)
    for scale, capability in ((None, 90), (torch.tensor([0.01]), 90), (None, 80)):
        own = None if scale is not None else group
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(common, "capability", lambda c=capability: c)
            got = fused.quantize_rows(x, scale, dtype, own)
        wanted = twins.quantize_rows(x, scale, dtype, own)
        assert got[0].dtype == dtype
        assert torch.equal(got[0].view(torch.int8), wanted[0].view(torch.int8))
        assert torch.equal(got[1], wanted[1])
        if own:
            assert got[1].stride() == (1, 9)


@interpreted
def test_rows_of_the_widest_models():
    """Feed-forward layers of 49152, as Qwen1.5-110B's, and of 53248, as Llama-3.1-405B's."""
    x = random(3, 53248)
    torch.testing.assert_close(fused.quantize_rows(x), twins.quantize_rows(x), rtol=0, atol=0)
    wide = random(2, 2 * 49152)
    got, wanted = (f.gated_product(wide, None, torch.float16) for f in (fused, twins))
    torch.testing.assert_close(got[0], wanted[0])


@interpreted
def test_runs_of_fused_rows():
    fp8 = torch.float8_e4m3fn
    x, weight, gate_up = random(5, 200), random(200), random(5, 400)
    for got, wanted in (
        [f.add_rms_norm(x, x, weight, 1e-5, None, fp8, 128)[:2] for f in (fused, twins)],
        [f.gated_product(gate_up, None, fp8, 128) for f in (fused, twins)],
    ):
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-6, atol=0)
        off = got[0].float() != wanted[0].float()
        assert off.float().mean() < 0.01, "ties that the order of a sum decides"


@pytest.mark.parametrize(("dtype", "group"), [("int8", None), ("float8_e4m3fn", 128)])
@interpreted
def test_norms_of_rows_that_are_not_finite_say_so(dtype, group):
    """In their scales: what is multiplied by integers of such a row is NaN again."""
    x = random(4, 256)
    x[1, 7], x[2, 200] = float("nan"), -float("inf")
    weight, dtype = torch.ones(256), getattr(torch, dtype)
    q, scales, _ = add_rms_norm(x, None, weight, 1e-5, None, dtype, group)
    assert scales[1:3].isnan().all()
    for row in (0, 3):
        alone = add_rms_norm(x[row : row + 1], None, weight, 1e-5, None, dtype, group)
        assert torch.equal(q[row].float(), alone[0][0].float())
        assert torch.equal(scales[row], alone[1][0])


@interpreted
def test_what_does_not_fit_is_refused():
    x = random(2, 8)
    refused(r"needed is \(8,\)", add_rms_norm, x, None, torch.ones(7), 1e-5)
    refused("added to something", add_rms_norm, x, None, torch.ones(8), 1e-5, after=torch.ones(8))
    refused("residual", add_rms_norm, x, x[:1], torch.ones(8), 1e-5)
    refused("odd number", gated_product, random(2, 7))
    refused("supported are", gated_product, x, dtype=torch.int32)
    refused("rows of 65537; the longest are of 65536", quantize_rows, torch.zeros(1, 65537))
    refused("one element", gated_product, x, torch.ones(2))
    for scale, dtype, group in (
        (None, torch.int8, 64),
        (None, torch.float16, 128),
        (torch.ones(1), torch.int8, 128),
    ):
        refused("may have groups of 128", quantize_rows, x, scale, dtype, group)
