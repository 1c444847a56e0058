"""From one attention to the next in one kernel: the numbers of single kernels, in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inference.requests.request import SamplingParams

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an sm_90 GPU",
)
if torch.cuda.is_available():
    from inference.bench.steps import make_engine
    from kernels.bench.case import relative
    from kernels.cuda.fused_block import BlockWeights, FusedBlocks, Router
    from kernels.triton.linear.w8a8 import pack_w8a8
    from kernels.triton.linear.weight import InputFormat
    from kernels.triton.linear.weight_only import pack_w4a16

    FLOATS = [InputFormat(torch.bfloat16)] * 4

EPS = 1e-5
# (inputs of o, channels, inputs of down, outputs of q, k and v)
SHAPES = (
    (4096, 4096, 14336, 6144),  # Llama-3-8B
    (3584, 3584, 18944, 4608),  # Qwen2.5-7B: 28 and 148 blocks for 16 warps
    (2048, 2048, 5632, 2560),  # TinyLlama: groups that programs do not share evenly
    (4096, 2560, 9728, 6144),  # Qwen3-4B: heads wider than the residual
    (1024, 1280, 1408, 1984),  # 8 warps, no size like another
)


def draw(shape, *, zeros=False, bias=False):
    """(packed weights, weights as fp64 [N, K], their biases)."""
    attention, hidden, inner, qkv = shape
    packed, plain, biases = [], [], []
    for n, k in ((hidden, attention), (2 * inner, hidden), (hidden, inner), (qkv, hidden)):
        q = torch.randint(-8, 8, (n, k), dtype=torch.int8, device="cuda")
        scale = (torch.rand(n, k // 128, device="cuda") + 0.5) / k**0.5 / 4
        zero = torch.randint(-8, 8, scale.shape, dtype=torch.int8, device="cuda") if zeros else None
        own = torch.randn(n, device="cuda") / 4 if bias else None
        packed.append(pack_w4a16(q, scale, own, zero))
        less = 0 if zero is None else zero.double().repeat_interleave(128, 1)
        plain.append(scale.double().repeat_interleave(128, 1) * (q.double() - less))
        biases.append(0 if own is None else own.double())
    norms = [(torch.rand(hidden, device="cuda") + 0.5).bfloat16() for _ in range(2)]
    return BlockWeights(*packed, norms=tuple(norms), inputs=FLOATS), plain, biases


def normed(x, weight):
    """RMSNorm in fp64, rounded to bf16."""
    scaled = x.double() / (x.double().square().mean(1, keepdim=True) + EPS).sqrt()
    return (scaled * weight.double()).bfloat16()


def expected(weights, plain, biases, x, residual):
    """In fp64, rounded to bf16 where the single kernels round."""

    def linear(i, x):
        return (x.double() @ plain[i].T + biases[i]).bfloat16()

    middle = (linear(0, x).float() + residual.float()).bfloat16()
    gate, up = linear(1, normed(middle, weights.norms[0])).double().chunk(2, 1)
    h = (torch.nn.functional.silu(gate) * up).bfloat16()
    total = (linear(2, h).float() + middle.float()).bfloat16()
    return total, linear(3, normed(total, weights.norms[1]))


@pytest.mark.parametrize(("zeros", "bias"), [(False, False), (True, True)])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_equals_its_products_in_fp64(shape, rows, zeros, bias):
    torch.manual_seed(0)
    weights, plain, biases = draw(shape, zeros=zeros, bias=bias)
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


def rows_in_int8(y, own, sinks):
    """(integers, scales [rows, 1]) of floats, as a layer wants them."""
    scale, which = own.scales_of(sinks)
    if scale is None:
        scale = y.double().abs().amax(1, keepdim=True).float() / 127
    else:
        scale = (scale if which is None else scale[which.long()]).reshape(-1, 1)
    return (y.float() / scale).round().clamp(-127, 127), scale


@pytest.mark.parametrize("kind", ["by token", "static", "sinks"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_of_integers_equals_its_products(shape, rows, kind):
    torch.manual_seed(0)
    attention, hidden, inner, qkv = shape
    sinks = torch.tensor([1, 0][:rows], dtype=torch.int32, device="cuda")
    scales = torch.tensor([[0.03, 0.1], [0.05, 0.2], [0.06, 0.2], [0.05, 0.1]], device="cuda")
    formats = [InputFormat(torch.int8)] * 4
    if kind != "by token":
        formats = [InputFormat(torch.int8, both[:1].clone()) for both in scales]
    if kind == "sinks":  # that of o is one for all, as attention may end in
        pairs = zip(formats, scales, strict=True)
        formats[1:] = [replace(own, both=both) for own, both in pairs][1:]
    packed, plain = [], []
    for n, k in ((hidden, attention), (2 * inner, hidden), (hidden, inner), (qkv, hidden)):
        q = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
        scale = (torch.rand(n, device="cuda") + 0.5) / k**0.5 / 64
        bias = torch.randn(n, device="cuda") / 4
        packed.append(pack_w8a8(q, scale, bias))
        plain.append((q.double(), scale, bias))
    norms = [(torch.rand(hidden, device="cuda") + 0.5).bfloat16() for _ in range(2)]
    weights = BlockWeights(*packed, norms=tuple(norms), inputs=formats)
    blocks = FusedBlocks(weights.shape, rows, torch.device("cuda"))

    def linear(i, q, scale):
        w, own, bias = plain[i]
        return ((q.double() @ w.T).float() * (scale * own) + bias).bfloat16()

    def scaled(x, weight):
        x = x.double()
        return x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()

    residual = torch.randn(rows, hidden, device="cuda").bfloat16()
    x, x_scale = rows_in_int8(torch.randn(rows, attention, device="cuda"), formats[0], sinks)
    middle = (linear(0, x, x_scale).float() + residual.float()).bfloat16()
    n = rows_in_int8(scaled(middle, norms[0]), formats[1], sinks)
    gate, up = linear(1, *n).double().chunk(2, 1)
    h = rows_in_int8(torch.nn.functional.silu(gate) * up, formats[2], sinks)
    total = (linear(2, *h).float() + middle.float()).bfloat16()
    wanted = total, linear(3, *rows_in_int8(scaled(total, norms[1]), formats[3], sinks))
    given = x.to(torch.int8), x_scale[:1].reshape(1) if kind == "static" else x_scale
    got = blocks.run(weights, *given, residual, EPS, sinks)
    assert relative(got[0], wanted[0]) < 2e-3
    assert relative(got[1], wanted[1]) < 4e-3
    for _ in range(20):
        for again, one in zip(blocks.run(weights, *given, residual, EPS, sinks), got, strict=True):
            assert torch.equal(again, one)


# (inputs of o, channels, inputs of an expert's down, outputs of q, k and v, experts, chosen)
MIXTURES = (
    (4096, 2048, 768, 5120, 128, 8),  # Qwen3-30B-A3B
    (1024, 1024, 512, 1536, 200, 5),  # 8 warps, programs with two outputs of the router
)


def first(weight):
    """The first of a stack of weights."""
    return replace(weight, packed=weight.packed[0], scale=weight.scale[0])


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("shape", MIXTURES)
def test_a_mixture_equals_its_products_in_fp64(shape, normalized):
    torch.manual_seed(0)
    attention, hidden, inner, qkv, experts, chosen = shape
    weights, plain, biases = draw((attention, hidden, inner, qkv))
    stacks = {}
    for name, n, k in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        q = torch.randint(-8, 8, (experts, n, k), dtype=torch.int8, device="cuda")
        scale = (torch.rand(experts, n, k // 128, device="cuda") + 0.5) / k**0.5 / 4
        stacks[name] = pack_w4a16(q, scale), scale, q
    router = (torch.randn(experts, hidden, device="cuda") / hidden**0.5).bfloat16()
    weights = replace(
        weights,
        gate_up=first(stacks["gate_up"][0]),
        down=first(stacks["down"][0]),
        router=Router(router, chosen, normalized, 1.5),
    )
    blocks = FusedBlocks(weights.shape, 1, torch.device("cuda"))

    def expert(name, e):
        _, scale, q = stacks[name]
        return scale[e].double().repeat_interleave(128, 1) * q[e].double()

    for _ in range(5):
        x = torch.randn(1, attention, device="cuda").bfloat16()
        residual = torch.randn(1, hidden, device="cuda").bfloat16()
        middle = ((x.double() @ plain[0].T).bfloat16().float() + residual.float()).bfloat16()
        n = normed(middle, weights.norms[0])
        scores = (n.double() @ router.double().T)[0].softmax(0)
        best, which = scores.topk(chosen)
        best = 1.5 * (best / best.sum() if normalized else best)
        y = torch.zeros(1, hidden, dtype=torch.float64, device="cuda")
        for share, e in zip(best, which.tolist(), strict=True):
            gate, up = (n.double() @ expert("gate_up", e).T).bfloat16().double().chunk(2, 1)
            h = (torch.nn.functional.silu(gate) * up).bfloat16()
            y += share * (h.double() @ expert("down", e).T)
        total = (y.bfloat16().float() + middle.float()).bfloat16()
        wanted = total, (normed(total, weights.norms[1]).double() @ plain[3].T + biases[3])
        got = blocks.run(weights, x, None, residual, EPS)
        assert relative(got[0], wanted[0]) < 4e-3
        assert relative(got[1], wanted[1]) < 8e-3
        for _ in range(20):
            for again, one in zip(blocks.run(weights, x, None, residual, EPS), got, strict=True):
                assert torch.equal(again, one)


def test_graphs_and_calls_may_follow_each_other():
    torch.manual_seed(0)
    weights, *_ = draw(SHAPES[2])
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


def test_numbers_that_are_not_finite_go_through_and_do_not_stay():
    torch.manual_seed(0)
    weights, *_ = draw(SHAPES[4])
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


def test_what_it_does_not_take_is_refused_or_left_to_single_kernels():
    weights, *_ = draw(SHAPES[4])
    blocks = FusedBlocks(weights.shape, 1, torch.device("cuda"))
    x = torch.randn(1, SHAPES[4][0], device="cuda").bfloat16()
    residual = torch.randn(1, SHAPES[4][1], device="cuda").bfloat16()
    with pytest.raises(ValueError, match=r"x is torch.float16 \(1, 1024\); needed is contiguous"):
        blocks.run(weights, x.half(), None, residual, EPS)
    with pytest.raises(ValueError, match="3 tokens; needed are 1 to 2"):
        FusedBlocks(weights.shape, 3, torch.device("cuda"))
    assert replace(weights, o=replace(weights.o, group=64)).shape is None
    assert replace(weights, norms=(weights.norms[0].float(), weights.norms[1])).shape is None


@pytest.mark.parametrize("scheme", ["w4c8", "a8w8c8"])
@pytest.mark.parametrize("batch", [1, 2])
def test_an_engine_gives_the_log_probabilities_of_single_kernels(batch, scheme):
    engine = make_engine("llama-1.1b", scheme, [batch], 128, "float", 1)
    executor = engine.loop.runner.executor
    assert executor.fused is not None
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=5, temperature=0)
    prompts = [[(7 * i + j) % 1000 + 1 for j in range(40)] for i in range(batch)]
    found = []
    for fused in (executor.fused, None):
        executor.fused = fused
        executor.graphs.forget()
        found.append(engine.generate(prompts, params))
    engine.close()
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
