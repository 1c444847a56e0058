"""fp8 in blocks of 128, rows quantized by runs, and sampling on a GPU against their twins."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available():
    import kernels.triton.reference as twins
    from kernels.bench import case, gpu_cases
    from kernels.triton import fused
    from kernels.triton.common import capability
    from kernels.triton.linear.fp8_block import LIBRARY_ROWS, pack_fp8_block
    from kernels.triton.sampling.sample import sample
    from kernels.triton.tuning import Tile

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 33, 64, 65, 131, 300, 600])
def test_blocks_equal_their_fp64_twin(dtype, rows, workspace):
    for outputs, inputs in ((6144, 4096), (192, 1408), (576, 10944), (1000, 208)):
        gpu_cases.gemm("fp8_block", rows, outputs, inputs, workspace, dtype).check()


def test_every_cut_gives_the_twin_and_the_same_bits_twice(workspace):
    q, scale = torch.randn(768, 1920, device="cuda").to(FP8), torch.rand(6, 15, device="cuda")
    bias, x = torch.randn(768, device="cuda"), torch.randn(70, 1920, device="cuda").bfloat16()
    weight = pack_fp8_block(q, scale, bias)
    xq, own = fused.quantize_rows(x, None, FP8, 128)
    wanted = twins.fp8_block_linear(xq, own, q, scale, bias)
    cuts = [(o, r, s) for o in (64, 128) for r in (16, 32, 64) for s in (1, 3)]
    for tile in (*(Tile(*cut) for cut in cuts), Tile(256, 16, 2), Tile(128, 128, 1, 3, 8)):
        got = weight.run(xq, own, workspace, torch.float32, tile=tile)
        assert case.relative(got, wanted) < 1e-3, tile  # of the tensor cores' own sums
        again = weight.run(xq, own.contiguous(), workspace, torch.float32, tile=tile)
        assert torch.equal(got, again), tile
    assert not workspace.arrivals.any()


def test_what_lies_behind_the_rows_does_not_matter(workspace):
    """K of 208 ends within a run; the interpreter has no NaN in e4m3 to show it."""
    x, own = torch.randn(17, 208, device="cuda").to(FP8), torch.rand(17, 2, device="cuda")
    x.view(torch.uint8)[16] = 127  # NaN
    q, scale = torch.randn(64, 208, device="cuda").to(FP8), torch.rand(1, 2, device="cuda")
    weight = pack_fp8_block(q, scale)
    got = weight.run(x[:16], own[:16], workspace, torch.float32)
    assert case.relative(got, twins.fp8_block_linear(x[:16], own[:16], q, scale)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [65, 128, 1000])
def test_the_library_agrees(dtype, rows, workspace):
    if capability() // 10 != 9:
        pytest.skip("cuBLASLt has blocks on Hopper alone")
    assert rows > LIBRARY_ROWS
    for outputs, inputs in ((512, 128), (1024, 2176), (512, 4096)):
        q = torch.randn(outputs, inputs, device="cuda").to(FP8)
        scale = torch.rand(outputs // 128, inputs // 128, device="cuda")
        weight = pack_fp8_block(q, scale, torch.randn(outputs, device="cuda"))
        x = torch.randn(rows, inputs, device="cuda").bfloat16()
        xq, own = fused.quantize_rows(x, None, FP8, 128)
        ours = weight.run(xq, own, workspace, dtype, tile=Tile(128, 128, 1, 3, 8))
        for scales in (own, own.contiguous()):
            theirs = weight.by_library(xq, scales, dtype)
            assert theirs.is_contiguous()
            assert case.relative(theirs, ours.double()) < 6e-3
        assert torch.equal(theirs, weight.run(xq, own, workspace, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [208, 4096, 14336])
def test_rows_are_quantized_bit_for_bit(dtype, size):
    x = (torch.randn(133, size, device="cuda") * 3).to(dtype)
    x[2], x[4] = 0, torch.logspace(-7, 2, size).to(dtype)
    static = torch.tensor([0.01], device="cuda")
    for storage, scale, group in (
        (torch.int8, None, None),
        (torch.int8, static, None),
        (FP8, None, None),
        (FP8, static, None),
        (FP8, None, 128),
        (torch.int8, None, 128),
    ):
        got = fused.quantize_rows(x, scale, storage, group)
        wanted = twins.quantize_rows(
            x.cpu(), None if scale is None else scale.cpu(), storage, group
        )
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(*(t.cpu().flatten().view(torch.int8) for t in (a, b)))


@pytest.mark.parametrize("size", [200, 14336])
def test_fused_rows_by_runs_equal_their_twins(size):
    x, other = (torch.randn(33, size, device="cuda").bfloat16() for _ in "ab")
    weight, gate_up = torch.rand(size, device="cuda"), torch.randn(33, 2 * size, device="cuda")
    for got, wanted in (
        [f.add_rms_norm(x, other, weight, 1e-6, None, FP8, 128) for f in (fused, twins)],
        [f.gated_product(gate_up, None, FP8, 128) for f in (fused, twins)],
    ):
        assert (got[0].float() != wanted[0].float()).float().mean() < 1e-3
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-5, atol=0)


def parameters(rows: int, vocabulary: int, dtype: torch.dtype, deviation: float) -> list:
    """Logits and a mixture of what requests ask for."""
    kinds = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 1, 1.0), (0.8, 50, 0.9), (1.0, 0, 0.95),
             (1.3, 2000, 1.0), (1.0, 0, 0.999), (2.0, 20000, 0.9), (0.0, 3, 0.5)]  # fmt: skip
    each = [[kinds[i % len(kinds)][j] for i in range(rows)] for j in range(3)]
    logits = (torch.randn(rows, vocabulary, device="cuda") * deviation).to(dtype)
    logits[:, 1::97] = -torch.inf
    temperature, k, p = (torch.tensor(x, device="cuda") for x in each)
    seeds = torch.randint(-(2**62), 2**62, (rows,), device="cuda")
    return [logits, temperature, k.int(), p, seeds, torch.arange(rows, device="cuda") + 2**33]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1000, 32000, 128256, 262144])
@pytest.mark.parametrize("deviation", [0.3, 3.0])
def test_sampling_equals_its_twin(dtype, vocabulary, deviation, workspace):
    """bf16 logits have many equals; of nearly even ones no few hold the mass."""
    arguments = parameters(18, vocabulary, dtype, deviation)
    got = sample(*arguments, workspace)
    assert torch.equal(got, twins.sample(*arguments))
    for row in (1, 3, 4, 7):
        alone = sample(*(t[row : row + 1].contiguous() for t in arguments), workspace)
        assert alone == got[row], row
    for _ in range(3):
        assert torch.equal(got, sample(*arguments, workspace))
    assert not workspace.arrivals.any()


def test_draws_are_distributed_as_they_should(workspace):
    draws, tokens = 100_000, 64
    row = torch.randn(1, tokens, device="cuda")
    for k, p in ((0, 1.0), (40, 0.95)):
        arguments = (
            row.expand(draws, -1).contiguous(), torch.full((draws,), 0.8, device="cuda"),
            torch.full((draws,), k, device="cuda").int(), torch.full((draws,), p, device="cuda"),
            torch.full((draws,), 3, device="cuda"), torch.arange(draws, device="cuda"),
        )  # fmt: skip
        parts = [
            sample(*(t[i : i + 1000] for t in arguments), workspace) for i in range(0, draws, 1000)
        ]
        kept = twins.likely(*(t[:1] for t in arguments[:4]))[0]
        share = torch.softmax(torch.where(kept, row[0] / 0.8, -torch.inf), 0) * draws
        counts = torch.cat(parts).bincount(minlength=tokens)
        assert not counts[~kept].any()
        freedom = int(kept.sum()) - 1
        assert ((counts - share)[kept] ** 2 / share[kept]).sum() < freedom + 4 * (
            2 * freedom
        ) ** 0.5


def test_a_graph_samples_what_its_inputs_say_at_replay(workspace):
    arguments = parameters(9, 32000, torch.bfloat16, 3.0)
    sample(*arguments, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(*arguments, workspace)
    for roll in (1, 4):
        for t in arguments[1:]:
            t.copy_(t.roll(roll))
        graph.replay()
        assert torch.equal(out, sample(*arguments, workspace))
        assert torch.equal(out, twins.sample(*arguments))
