"""From one attention to the next in one kernel: the numbers of single kernels, in any order."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch

from inference.gpu.sizes import decodes_of
from inference.requests.request import SamplingParams
from tests.kernels.cuda.blocks import EPS, Integers, Mixture, draw, draw_dense, expected

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an sm_90 GPU",
)
if torch.cuda.is_available():
    from inference.bench.steps import make_engine
    from kernels.bench.case import relative
    from kernels.cuda.fused_block import FusedBlocks

# (inputs of o, channels, inputs of down, outputs of q, k and v)
SHAPES = (
    (4096, 4096, 14336, 6144),  # Llama-3-8B
    (3584, 3584, 18944, 4608),  # Qwen2.5-7B: 28 and 148 blocks for 16 warps
    (2048, 2048, 5632, 2560),  # TinyLlama: groups that programs do not share evenly
    (4096, 2560, 9728, 6144),  # Qwen3-4B: heads wider than the residual
    (1024, 1280, 1408, 1984),  # 8 warps, no size like another
)
ROWS = [(shape, rows) for shape in SHAPES for rows in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("shape", "rows", "kind"),
    [(*own, kind) for own in ROWS for kind in ("int4", "int4 with zero points", "bf16")],
)
def test_a_block_equals_its_products_in_fp64(shape, rows, kind):
    torch.manual_seed(0)
    if kind == "bf16":
        weights, plain, biases = draw_dense(shape, "cuda", bias=True)
    else:
        weights, plain, biases = draw(shape, "cuda", zeros=kind != "int4", bias=kind != "int4")
    blocks = FusedBlocks(weights.shape, rows, torch.device("cuda"))
    for outlier in (1, 1000):  # a channel so much larger than others
        x = torch.randn(rows, shape[0], device="cuda")
        x[:, 77] *= outlier
        x, residual = x.bfloat16(), torch.randn(rows, shape[1], device="cuda").bfloat16()
        wanted = expected(weights, plain, biases, x, residual)
        got = blocks.run(weights, x, None, residual, EPS)
        assert relative(got[0], wanted[0]) < 4e-3
        assert relative(got[1], wanted[1]) < 8e-3
        for _ in range(20):  # both sets of places that programs hand on by
            for again, first in zip(blocks.run(weights, x, None, residual, EPS), got, strict=True):
                assert torch.equal(again, first)


@pytest.mark.parametrize("kind", ["by token", "static", "sinks"])
@pytest.mark.parametrize(("shape", "rows"), ROWS)
def test_a_block_of_integers_equals_its_products(shape, rows, kind):
    torch.manual_seed(0)
    own = Integers(shape, rows, kind, "cuda")
    blocks = FusedBlocks(own.weights.shape, rows, torch.device("cuda"))
    rest = *own.given, own.residual, EPS, own.sinks
    wanted, got = own.expected(), blocks.run(own.weights, *rest)
    assert relative(got[0], wanted[0]) < 2e-3
    assert relative(got[1], wanted[1]) < 4e-3
    for _ in range(20):
        for again, one in zip(blocks.run(own.weights, *rest), got, strict=True):
            assert torch.equal(again, one)


# (inputs of o, channels, inputs of an expert's down, outputs of q, k and v, experts, chosen)
MIXTURES = (
    (4096, 2048, 768, 5120, 128, 8),  # Qwen3-30B-A3B
    (1024, 1024, 512, 1536, 200, 5),  # 8 warps, programs with two outputs of the router
)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("shape", MIXTURES)
def test_a_mixture_equals_its_products_in_fp64(shape, normalized):
    torch.manual_seed(0)
    own = Mixture(shape, "cuda", normalized=normalized)
    blocks = FusedBlocks(own.weights.shape, 1, torch.device("cuda"))
    for _ in range(5):
        x = torch.randn(1, shape[0], device="cuda").bfloat16()
        residual = torch.randn(1, shape[1], device="cuda").bfloat16()
        wanted = own.expected(x, residual)
        got = blocks.run(own.weights, x, None, residual, EPS)
        assert relative(got[0], wanted[0]) < 4e-3
        assert relative(got[1], wanted[1]) < 8e-3
        for _ in range(20):
            for again, one in zip(
                blocks.run(own.weights, x, None, residual, EPS), got, strict=True
            ):
                assert torch.equal(again, one)


@pytest.mark.parametrize("drawn", [draw, draw_dense])
def test_graphs_and_calls_may_follow_each_other(drawn):
    torch.manual_seed(0)
    weights, *_ = drawn(SHAPES[2], "cuda")
    one, two = (FusedBlocks(weights.shape, rows, torch.device("cuda")) for rows in (1, 2))
    x = torch.randn(2, SHAPES[2][0], device="cuda").bfloat16()
    residual = torch.randn(2, SHAPES[2][1], device="cuda").bfloat16()
    wanted = two.run(weights, x, None, residual, EPS)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        chained = residual
        for _ in range(3):  # an odd number, so that sets are taken in turn by replays
            chained, last = two.run(weights, x, None, chained, EPS)
        first = two.run(weights, x, None, residual, EPS)
    results = []
    for _ in range(50):
        graph.replay()
        results.append((last.clone(), *(t.clone() for t in first)))
        alone = one.run(weights, x[:1].contiguous(), None, residual[:1].contiguous(), EPS)
        results[-1] += tuple(t.clone() for t in alone)
    for own in results:
        assert torch.equal(own[1], wanted[0])
        assert torch.equal(own[2], wanted[1])
        assert all(torch.equal(a, b) for a, b in zip(own, results[0], strict=True))


@pytest.mark.parametrize("drawn", [draw, draw_dense])
def test_numbers_that_are_not_finite_go_through_and_do_not_stay(drawn):
    torch.manual_seed(0)
    weights, *_ = drawn(SHAPES[4], "cuda")
    blocks = FusedBlocks(weights.shape, 1, torch.device("cuda"))
    x = torch.randn(1, SHAPES[4][0], device="cuda").bfloat16()
    residual = torch.randn(1, SHAPES[4][1], device="cuda").bfloat16()
    wanted = blocks.run(weights, x, None, residual, EPS)
    for bad in (float("inf"), float("nan")):
        broken = x.clone()
        broken[0, 5] = bad
        total, qkv = blocks.run(weights, broken, None, residual, EPS)
        assert total.isnan().all()
        assert qkv.isnan().all()
        got = blocks.run(weights, x, None, residual, EPS)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_the_last_block_ends_with_the_residual_stream(kind):
    torch.manual_seed(0)
    own = Integers(SHAPES[0], 2, "static", "cuda")
    x, scale = own.given if kind == "int8" else (torch.randn_like(own.residual), None)
    weights = own.weights if kind == "int8" else draw(SHAPES[0], "cuda")[0]
    last = replace(weights, qkv=None, norms=weights.norms[:1], inputs=weights.inputs[:3])
    whole, ended = (FusedBlocks(w.shape, 2, torch.device("cuda")) for w in (weights, last))
    wanted = whole.run(weights, x, scale, own.residual, EPS)[0]
    for _ in range(20):
        total, qkv = ended.run(last, x, scale, own.residual, EPS)
        assert torch.equal(total, wanted)
        assert qkv is None


def test_what_it_does_not_take_is_refused_or_left_to_single_kernels():
    weights, *_ = draw(SHAPES[4], "cuda")
    blocks = FusedBlocks(weights.shape, 1, torch.device("cuda"))
    x = torch.randn(1, SHAPES[4][0], device="cuda").bfloat16()
    residual = torch.randn(1, SHAPES[4][1], device="cuda").bfloat16()
    with pytest.raises(ValueError, match=r"x is torch.float16 \(1, 1024\); needed is contiguous"):
        blocks.run(weights, x.half(), None, residual, EPS)
    with pytest.raises(ValueError, match="5 tokens; needed are 1 to 4"):
        FusedBlocks(weights.shape, 5, torch.device("cuda"))
    assert replace(weights, o=replace(weights.o, group=64)).shape is None
    assert replace(weights, norms=(weights.norms[0].float(), weights.norms[1])).shape is None
    floats, *_ = draw_dense(SHAPES[4], "cuda")
    own = floats.o.weight
    for weight in (own.half(), own.T.contiguous().T):
        assert replace(floats, o=replace(floats.o, weight=weight)).shape is None
    assert replace(floats, inputs=[replace(floats.inputs[0], dtype=torch.int8)] * 4).shape is None


@pytest.mark.parametrize(
    ("scheme", "batch"),
    [(scheme, batch) for scheme in ("float", "w4c8", "a8w8c8") for batch in (1, 2, 3, 4)],
)
def test_an_engine_gives_the_log_probabilities_of_single_kernels(batch, scheme):
    engine = make_engine("llama-1.1b", scheme, [batch], 128, "float", 1)
    executor = engine.loop.runner.executor
    layers = executor.fused
    assert layers is not None
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=5, temperature=0)
    prompts = [[(7 * i + j) % 1000 + 1 for j in range(40)] for i in range(batch)]
    found = []
    for fused in (layers, None):
        executor.fused = fused
        executor.graphs.forget()
        found.append(engine.generate(prompts, params))
    engine.close()
    taken = {rows for (_, rows), kernel in layers._kernels.items() if kernel is not None}
    assert decodes_of(batch).decodes in taken
    for one, many in zip(*found, strict=True):
        assert one.token_ids[0] == many.token_ids[0]  # of the prompt, which is not fused
        apart = []
        for i, (own, other) in enumerate(zip(one.logprobs, many.logprobs, strict=True)):
            if one.token_ids[:i] != many.token_ids[:i]:  # a near tie fell otherwise
                break
            shared = own.keys() & other.keys()
            assert len(shared) >= 4
            apart += [abs(own[token] - other[token]) for token in shared]
        assert len(apart) >= 8
        assert sum(apart) / len(apart) < 0.1  # by roundings of logits in bf16, and of int8 rows


@pytest.mark.timeout(float(os.environ.get("PTQ_STEP_SECONDS", "5")) + 200)
@pytest.mark.parametrize("scheme", ["w4c8", "a8w8c8"])
def test_steps_go_on_while_requests_are_aborted(scheme):
    """For five seconds, or PTQ_STEP_SECONDS; every 50th step has an abort."""
    engine = make_engine("llama-1.1b", scheme, [4], 512, "float", 1)
    alone = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    prompt = [(5 * i) % 1000 + 1 for i in range(60)]
    wanted = engine.generate([prompt], alone)[0].token_ids
    end, steps, aborted = time.monotonic() + float(os.environ.get("PTQ_STEP_SECONDS", "5")), 0, 0
    names: list[str] = []
    while steps < 500 or time.monotonic() < end:
        while len(names) < 1 + steps // 200 % 4:  # one to four tokens a step
            params = SamplingParams(max_tokens=30 + 7 * (steps % 11), ignore_eos=True)
            tokens = [(3 * i + steps) % 1000 + 1 for i in range(20 + steps % 300)]
            names.append(engine.add_request(tokens, params))
        if steps % 50 == 49:
            aborted += engine.abort(names.pop(steps // 50 % len(names))) is not None
        ended = {output.request_id for output in engine.step() if output.finish_reason}
        names = [name for name in names if name not in ended]
        steps += 1
    for name in names:
        engine.abort(name)
    assert aborted >= steps // 50 - 1
    assert engine.generate([prompt], alone)[0].token_ids == wanted
    engine.check_integrity()
    engine.close()
