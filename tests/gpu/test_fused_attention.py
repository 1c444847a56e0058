"""A block's attention in its one kernel: the bytes of the cache, and the numbers, of single kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an sm_90 GPU",
)
if torch.cuda.is_available():
    from inference.gpu.layers import as_wanted, workspace_on
    from kernels.bench.case import relative
    from kernels.cuda.attention import Attention, attention_shape
    from kernels.cuda.fused_block import BlockWeights, FusedBlocks
    from kernels.op_inputs import AttentionInputs, KVPool
    from kernels.triton.attention.decode import decode_attention
    from kernels.triton.attention.rope_cache import rope_write
    from kernels.triton.linear.w8a8 import pack_w8a8
    from kernels.triton.linear.weight import InputFormat
    from tests.gpu.test_fused_block import draw

EPS = 1e-5
# (channels, inputs of down, KV heads, queries of each, channels of a head, bits of the cache,
# lengths of the sequences, whether q and k are normed and keys are centred)
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
)


class Case:
    """Pools, rows and places of a case, twice where a run writes them."""

    def __init__(self, hidden, kv, queries, dim, cache, lengths, normed):
        rows, pages = len(lengths), sum(-(-n // 64) for n in lengths) + 3
        offset = torch.randn(kv, dim, device="cuda") / 4 if normed and cache == 8 else None
        shape = pages, kv, 64, dim
        if cache == 8:
            k, v = (torch.randint(-100, 100, shape, device="cuda").to(torch.int8) for _ in "kv")
            k_scale, v_scale = ((torch.rand(kv, device="cuda") + 0.5) / 40 for _ in "kv")
        else:
            k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in "kv")
            k_scale = v_scale = None
        v = v.transpose(2, 3).contiguous()
        pool = KVPool(k, v, k_scale, v_scale, k_offset=offset)
        self.pools = pool, replace(pool, k=k.clone(), v=v.clone())
        self.tables = torch.zeros(rows, max(lengths) // 64 + 2, dtype=torch.int32, device="cuda")
        self.slots = torch.full((rows,), -1, device="cuda")
        free = torch.randperm(pages, device="cuda").int()
        for row, n in enumerate(lengths):
            own, free = free.tensor_split([-(-n // 64)])
            self.tables[row, : len(own)] = own
            if n:
                self.slots[row] = own[-1].long() * 64 + (n - 1) % 64
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.positions = (self.lengths.long() - 1).clamp(min=0)
        angle = torch.rand(max(lengths) + 1, dim // 2, device="cuda") * 6.28
        self.turn = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        q_norm, k_norm = ((torch.rand(dim, device="cuda") + 0.5).bfloat16() for _ in "qk")
        self.norms = (q_norm, k_norm) if normed else (None, None)
        self.qkv = 2 * torch.randn(rows, (queries + 2) * kv * dim, device="cuda").bfloat16()
        self.residual = torch.randn(rows, hidden, device="cuda").bfloat16()
        self.heads = [kv * queries, kv, kv]
        self.dim = dim

    def inputs(self, pool):
        return AttentionInputs(pool, self.tables, self.lengths, None, self.dim**-0.5)

    def single(self, **out):
        """What the single kernels give."""
        q, k, v = self.qkv.unflatten(1, (-1, self.dim)).split(self.heads, 1)
        places, (q_norm, k_norm) = (self.slots, self.positions), self.norms
        q = rope_write(
            q, k, v, *self.turn, self.pools[1], *places, q_norm=q_norm, k_norm=k_norm, eps=EPS
        )
        y = decode_attention(q, self.inputs(self.pools[1]), workspace_on(q.device), **out)
        return y.flatten(1)

    def attention(self):
        own = self.inputs(self.pools[0])
        return Attention(self.qkv, self.norms, self.turn, self.positions, self.slots, own)

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


@pytest.mark.parametrize("case", CASES)
def test_a_block_with_its_attention_equals_single_kernels(case):
    torch.manual_seed(0)
    hidden, inner, kv, queries, dim, _, _, _ = case
    own = Case(hidden, kv, queries, *case[4:])
    shape = kv * queries * dim, hidden, inner, (queries + 2) * kv * dim
    own.check(draw(shape)[0], own.single(), None, (5e-3, 5e-3))


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("lengths", [[4048], [130, 2000]])
def test_a_block_of_integers_with_its_attention_equals_single_kernels(lengths, static):
    torch.manual_seed(0)
    own = Case(2048, 8, 4, 64, 8, lengths, True)
    known = torch.tensor([0.004], device="cuda") if static else None
    formats = [InputFormat(torch.int8, known), *[InputFormat(torch.int8)] * 3]
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
    weights = draw((2048, 2048, 5632, 2560))[0]
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
