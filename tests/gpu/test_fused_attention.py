"""A block's attention in its one kernel: the bytes of the cache, and the numbers, of single kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.cuda.blocks import EPS, Heads, draw, draw_dense

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an sm_90 GPU",
)
if torch.cuda.is_available():
    from inference.gpu.layers import as_wanted, workspace_on
    from kernels.bench.case import relative
    from kernels.cuda.attention import attention_shape
    from kernels.cuda.block_weights import BlockWeights
    from kernels.cuda.fused_block import FusedBlocks
    from kernels.triton.attention.decode import decode_attention
    from kernels.triton.attention.rope_cache import rope_write
    from kernels.triton.linear.w8a8 import pack_w8a8
    from kernels.triton.linear.weight import InputFormat

# (channels, inputs of down, KV heads, queries of each, channels of a head, bits of the cache,
# lengths of the sequences, whether q and k are normed and keys are centred, rows of one sequence)
CASES = (
    (4096, 14336, 8, 4, 128, 8, [4048], False),  # Llama-3-8B
    (4096, 14336, 8, 4, 128, 16, [1000], False),
    (4096, 14336, 8, 4, 128, 8, [1], True),
    (4096, 14336, 8, 4, 128, 8, [700, 0], False),  # a row that stands for nothing
    (4096, 14336, 8, 4, 128, 8, [9000, 64], True),  # several turns, and a page that is full
    (2048, 5632, 4, 8, 64, 8, [4033], False),  # TinyLlama; the first token of a page
    (2048, 5632, 4, 8, 64, 16, [65, 5000], True),
    (1280, 1408, 8, 1, 128, 8, [333], False),  # 8 warps
    (1024, 1408, 2, 8, 128, 16, [100, 31], True),  # 8 warps, more heads than these
    (2048, 4096, 4, 8, 128, 16, [20000], True),
    (3584, 4096, 4, 7, 128, 8, [127, 129], False),  # Qwen2.5-7B's heads
    (2048, 5632, 32, 1, 64, 16, [777], False),
    (4096, 14336, 8, 4, 128, 8, [4048, 0, 64], False),  # three rows
    (4096, 11008, 8, 4, 128, 16, [1000, 4048, 1, 65], True),  # four: of bf16 14,336 would not fit
    (2048, 5632, 4, 8, 64, 8, [700, 5000, 0, 129], True),
    (4096, 14336, 8, 4, 128, 8, [4096, 4097], False, 2),  # of one sequence, on two pages
    (4096, 11008, 8, 4, 128, 8, [40, 63, 64, 65], True, 3),
    (2048, 5632, 4, 8, 64, 16, [8192, 8193, 8194, 8195], True, 4),
)


class Case(Heads):
    """An attention by single kernels, and in the kernel of its block."""

    def __init__(self, *case):
        super().__init__(*case[:7], "cuda", *case[7:])

    def single(self, **out):
        """What the single kernels give."""
        q, k, v = self.qkv.unflatten(1, (-1, self.dim)).split(self.heads, 1)
        places, (q_norm, k_norm) = (self.slots, self.positions), self.norms
        q = rope_write(
            q, k, v, *self.turn, self.pools[1], *places, q_norm=q_norm, k_norm=k_norm, eps=EPS
        )
        y = decode_attention(q, self.inputs(self.pools[1]), workspace_on(q.device), **out)
        return y.flatten(1)

    def check(self, weights, x, x_scale, bounds):
        """One kernel gives what `weights` make of x, and the same bits each time."""
        rows, device = len(self.qkv), self.qkv.device
        assert weights.shape is not None
        wanted = FusedBlocks(weights.shape, rows, device).run(
            weights, x, x_scale, self.residual, EPS
        )
        own = self.attention()
        heads = attention_shape(own.inputs, self.heads[0])
        blocks = FusedBlocks(replace(weights.shape, heads=heads), rows, device)
        got = blocks.run(weights, own, None, self.residual, EPS)
        for one, other, bound in zip(got, wanted, bounds, strict=True):
            assert relative(one, other) < bound
        assert torch.equal(self.pools[0].k, self.pools[1].k)
        assert torch.equal(self.pools[0].v, self.pools[1].v)
        for _ in range(20):
            again = blocks.run(weights, own, None, self.residual, EPS)
            assert all(map(torch.equal, again, got))


@pytest.mark.parametrize("drawn", [draw, draw_dense])
@pytest.mark.parametrize("case", CASES)
def test_a_block_with_its_attention_equals_single_kernels(case, drawn):
    torch.manual_seed(0)
    hidden, inner, kv, queries, dim, *_ = case
    own = Case(hidden, kv, queries, *case[4:])
    shape = kv * queries * dim, hidden, inner, (queries + 2) * kv * dim
    own.check(drawn(shape, "cuda")[0], own.single(), None, (5e-3, 6e-3))


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("lengths", [[4048], [130, 2000], [1, 64, 700], [130, 0, 65, 2000]])
def test_a_block_of_integers_with_its_attention_equals_single_kernels(lengths, static):
    torch.manual_seed(0)
    own = Case(2048, 8, 4, 64, 8, lengths, True)
    known, of_down = (torch.tensor([x], device="cuda") if static else None for x in (0.004, 0.02))
    formats = [InputFormat(torch.int8, scale) for scale in (known, None, of_down, None)]
    packed = []
    for n, k in ((2048, 2048), (2 * 4096, 2048), (2048, 4096), (3072, 2048)):
        q = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
        packed.append(pack_w8a8(q, (torch.rand(n, device="cuda") + 0.5) / k**0.5 / 64, None))
    first, second = ((torch.rand(2048, device="cuda") + 0.5).bfloat16() for _ in range(2))
    weights = BlockWeights(*packed, norms=(first, second), inputs=formats)
    if static:
        x, scale = own.single(out_scale=known, out_dtype=torch.int8), known
    else:
        x, scale = as_wanted(own.single(), formats[0], None)
    own.check(weights, x, scale, (3e-2, 4e-2))  # an integer of x is now and then one other


def test_numbers_that_are_not_finite_are_not_lost():
    own = Case(2048, 4, 8, 64, 8, [300], False)
    weights = draw((2048, 2048, 5632, 2560), "cuda")[0]
    own.qkv[0, 5] = torch.inf
    attention = own.attention()
    heads = attention_shape(attention.inputs, 32)
    assert weights.shape is not None
    blocks = FusedBlocks(replace(weights.shape, heads=heads), 1, own.qkv.device)
    for _ in range(3):
        assert blocks.run(weights, attention, None, own.residual, EPS)[1].isnan().all()


def test_attention_that_the_kernel_does_not_take():
    own = Case(2048, 4, 8, 64, 8, [300], False)
    inputs = own.inputs(own.pools[0])
    assert attention_shape(inputs, 32) is not None
    assert attention_shape(inputs, 64) is None  # 16 queries of a KV head
    assert attention_shape(replace(inputs, sliding_window=100), 32) is None
    assert attention_shape(replace(inputs, softcap=30.0), 32) is None
    assert attention_shape(replace(inputs, pool=replace(own.pools[0], turn=64)), 32) is None
    heads, wrong = attention_shape(inputs, 32), replace(own.attention(), slots=own.slots.repeat(2))
    assert heads is not None
    with pytest.raises(ValueError, match=r"slots: torch\.int64"):
        wrong.arguments(heads)
