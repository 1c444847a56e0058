"""K and V of sink tokens: kept in float beside every kind of quantized cache, alike in all kernels."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kernels.reference as reference
import kernels.reference_attention as reference_attention
from kernels.cpu import native, native_attention
from kernels.op_inputs import KV_BLOCK, AttentionInputs, KVPool
from kernels.packed_cache import turned

HEADS, GROUP, DIM, BLOCKS = 2, 3, 48, 5
KINDS = ("int8", "int8_channel", "int8_token", "fp8", "int4_token", "k8v4")
compiled = pytest.mark.skipif(native.library() is None, reason="no compiler")


def empty_pool(kind: str, sinks: int) -> KVPool:
    k_type = {"fp8": torch.float8_e4m3fn, "int4_token": torch.uint8}.get(kind, torch.int8)
    v_type = torch.uint8 if kind == "k8v4" else k_type
    shape, packed = (BLOCKS, HEADS, KV_BLOCK), {torch.uint8: DIM // 2}
    k, v = (torch.zeros(*shape, packed.get(t, DIM), dtype=t) for t in (k_type, v_type))
    room = torch.zeros(BLOCKS, HEADS, sinks, DIM).bfloat16()
    more = {"sink_k": room, "sink_v": room.clone()} if sinks else {}
    if kind.endswith("token") or kind == "k8v4":
        held = torch.float16 if kind != "int8_token" else torch.float32
        scales = [torch.ones(shape, dtype=held) for _ in "kv"]
        return KVPool(k, v, *scales, dynamic=True, **more)
    k_scale = torch.linspace(0.02, 0.04, HEADS)
    if kind == "int8_channel":
        k_scale = torch.linspace(0.01, 0.05, HEADS * DIM).view(HEADS, DIM)
    return KVPool(k, v, k_scale, torch.linspace(0.02, 0.03, HEADS), **more)


def steps(lengths: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, slots, positions) of whole prompts, sequence s in the blocks from 2 s on."""
    torch.manual_seed(seed)
    tokens = sum(lengths)
    q = torch.randn(tokens, HEADS * GROUP, DIM)
    k, v = torch.randn(tokens, HEADS, DIM), torch.randn(tokens, HEADS, DIM)
    positions = torch.cat([torch.arange(n) for n in lengths])
    first = torch.cat([torch.full((n,), 2 * s * KV_BLOCK) for s, n in enumerate(lengths)])
    k[positions == 0] *= 0.01  # as sinks have them: far smaller, and of a scale of their own
    v[positions == 0] *= 0.001
    return q, k, v, first + positions, positions


def inputs_of(pool: KVPool, lengths: tuple[int, ...], **more: object) -> AttentionInputs:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    tables = torch.tensor([[0, 1], [2, 3]])[: len(lengths)]
    return AttentionInputs(pool, tables, torch.tensor(lengths), ends, 0.3, **more)  # type: ignore[arg-type]


@compiled
@pytest.mark.parametrize("sinks", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, {"sliding_window": 9}, {"softcap": 5.0}], ids=str)
def test_compiled_kernels_agree_with_plain_torch(kind: str, sinks: int, more: dict) -> None:
    lengths = (70, 3)
    q, k, v, slots, positions = steps(lengths)
    pools = empty_pool(kind, sinks), empty_pool(kind, sinks)
    native_attention.write_kv(k, v, pools[0], slots, positions)
    reference.write_kv(k, v, pools[1], slots, positions)
    for name in ("k", "v", "sink_k", "sink_v"):
        one, other = getattr(pools[0], name), getattr(pools[1], name)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name
    got = native_attention.paged_attention(q, inputs_of(pools[0], lengths, **more))
    want = reference_attention.paged_attention(q, inputs_of(pools[1], lengths, **more))
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sink_tokens_are_as_exact_as_bf16(kind: str) -> None:
    """Where a sequence is its sink tokens, attention is that over bf16."""
    sinks = 4
    q, k, v, slots, positions = steps((sinks,))
    pool = empty_pool(kind, sinks)
    native_attention.write_kv(k, v, pool, slots, positions)
    got = native_attention.paged_attention(q, inputs_of(pool, (sinks,)))
    shape = (BLOCKS, HEADS, KV_BLOCK, DIM)
    plain = KVPool(torch.zeros(shape), torch.zeros(shape))
    reference.write_kv(k.bfloat16().float(), v.bfloat16().float(), plain, slots)
    want = reference_attention.paged_attention(q, inputs_of(plain, (sinks,)))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_steps_have_the_bits_of_a_whole_prompt(kind: str) -> None:
    q, k, v, slots, positions = steps((70,))
    whole = empty_pool(kind, 2)
    native_attention.write_kv(k, v, whole, slots, positions)
    want = native_attention.paged_attention(q, inputs_of(whole, (70,)))
    cut = empty_pool(kind, 2)
    for begin, end in ((0, 1), (1, 2), (2, 65), (65, 70)):
        part = slice(begin, end)
        native_attention.write_kv(k[part], v[part], cut, slots[part], positions[part])
        own = replace(inputs_of(cut, (end,)), query_start=torch.tensor([0, end - begin]))
        assert torch.equal(native_attention.paged_attention(q[part], own), want[part])


def test_other_tokens_keep_their_bits_and_turned_keys_are_turned() -> None:
    """What is written of tokens behind the sinks does not depend on them."""
    _, k, v, slots, positions = steps((70,))
    plain, own = empty_pool("int8", 0), empty_pool("int8", 3)
    native_attention.write_kv(k, v, plain, slots)
    native_attention.write_kv(k, v, own, slots, positions)
    assert torch.equal(plain.k, own.k)
    assert torch.equal(plain.v, own.v)
    offset = torch.randn(HEADS, DIM)
    centred = replace(empty_pool("int4_token", 3), k_offset=offset, turn=16)
    native_attention.write_kv(turned(k, 16), v, centred, slots, positions)
    want = (turned(k, 16)[:3] - offset).transpose(0, 1).bfloat16()
    assert torch.equal(centred.sink_k[0], want)


@compiled
def test_what_does_not_fit_is_refused() -> None:
    _, k, v, slots, positions = steps((3,))
    pool = empty_pool("int8", 2)
    with pytest.raises(ValueError, match="position of each token"):
        native_attention.write_kv(k, v, pool, slots)
    wrong = replace(pool, sink_k=torch.zeros(1, HEADS, 2, DIM).bfloat16())
    with pytest.raises(ValueError, match="room for sink tokens"):
        native_attention.write_kv(k, v, wrong, slots, positions)
