"""Attention, rotation and cache write in Triton's interpreter against their twins."""

from dataclasses import replace

import pytest
import torch

import kernels.triton.reference as twins
from kernels.op_inputs import AttentionInputs, KVPool
from kernels.packed_cache import feedback_of, pack_halves, unpack_halves
from kernels.reference import apply_rope
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.attention.rope_cache import rope_write, rotate
from kernels.triton.common import Workspace
from kernels.triton.tuning import KVSplit, PrefillTile
from tests.kernels.triton_lab import distance, interpreted
from tests.refusals import refused

PAGES = 12
STORAGE = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
LENGTHS = (1, 65, 0, 200, 128)


def make_tables(generator: torch.Generator) -> torch.Tensor:
    """Pages of the sequences, scattered in the pool."""
    order, tables = torch.randperm(PAGES, generator=generator), torch.zeros(len(LENGTHS), 4).int()
    for s, length in enumerate(LENGTHS):
        pages = -(-length // 64)
        tables[s, :pages], order = order[:pages], order[pages:]
    return tables


def make_inputs(storage: str, dims: int, heads: int, dim: int, **rest):
    """Random pages with scales of so many dimensions; NaN scales of tokens where no token is."""
    generator = torch.Generator().manual_seed(0)
    shape = (PAGES, heads, 64, dim)
    pools = [torch.randint(-127, 128, shape, generator=generator).float() for _ in "kv"]
    if "4" in storage:
        pools[1] = pools[1].fmod(8)
        pools = [pools[0].fmod(8) if storage == "int4" else pools[0], pools[1]]
    pools[1] = pools[1].transpose(2, 3).contiguous()
    shape = {0: (), 1: (heads,), 2: (heads, dim), 3: (PAGES, heads, 64)}[dims]
    scales = [torch.rand(shape, generator=generator) * 0.01 + 0.01 for _ in "kv"]
    if dims == 0:
        pools, scales = [pool * 0.015 for pool in pools], [None, None]
    if dims == 2:
        scales[1] = scales[1][:, 0].contiguous()
    tables = make_tables(generator)
    for s, length in enumerate(LENGTHS):
        if dims == 3 and length % 64:
            for scale in scales:
                scale[tables[s, length // 64], :, length % 64 :] = float("nan")
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    held = pages_of(storage, *pools)
    if dims == 3 and "4" in storage:  # of int4, scales of tokens are fp16 and of either sign
        scales[1] = scales[1] * torch.where(torch.rand(shape, generator=generator) < 0.5, -8, 8)
        scales = [scale.half() for scale in scales]
    pool = KVPool(*held, *scales, dynamic=dims == 3)
    rest = {"query_start": None, "softmax_scale": dim**-0.5, **rest}
    return AttentionInputs(pool, tables, lengths, **rest)


def pages_of(storage, k, v):
    """K, channels last, and V, tokens last, as they are stored."""
    if "4" not in storage:
        return [x.to(STORAGE[storage]) for x in (k, v)]
    packed = pack_halves(v.transpose(2, 3).to(torch.int8)).transpose(2, 3).contiguous()
    return [pack_halves(k.to(torch.int8)) if storage == "int4" else k.to(torch.int8), packed]


def make_queries(tokens: int, heads: int, dim: int) -> torch.Tensor:
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(1))


def check_decode(q: torch.Tensor, inputs: AttentionInputs, splits: int = 1) -> torch.Tensor:
    """The kernel's result, which is its twin's; one of no tokens is 0, and no counter is left."""
    workspace = Workspace.on("cpu", 1 << 17, 64)
    got = decode_attention(q, inputs, workspace, split=KVSplit(4, splits))
    assert distance(got, twins.decode_attention(q, inputs)) < 8e-4
    assert not got[2].any()
    assert not workspace.arrivals.any()
    return got


def check_prefill(
    q: torch.Tensor, inputs: AttentionInputs, decodes: int, tokens: int, starts: tuple[int, ...]
) -> None:
    """Prompts that begin at so many rows get what their twin gives."""
    inputs = replace(inputs, query_start=torch.tensor(starts).int())
    workspace, tile = Workspace.on("cpu", 1 << 17, 64), PrefillTile(64, tokens, 4, 2)
    got, end = prefill_attention(q, inputs, workspace, decodes, tile=tile), starts[-1]
    assert distance(got[:end], twins.prefill_attention(q, inputs)[:end]) < 8e-4


STARTS = (0, 1, 34, 34, 100, 105)  # of lengths 1, 65, 0, 200, 128


@pytest.mark.parametrize(
    ("storage", "dims", "shape"),
    [
        ("int4", 1, (4, 2, 32, None, 1)), ("int4", 2, (4, 2, 48, 70, 2)),
        ("int4", 3, (3, 1, 80, None, 3)), ("k8v4", 3, (4, 1, 96, None, 2)),
        ("k8v4", 1, (2, 1, 16, None, 2)), ("int8", 1, (4, 2, 32, None, 1)),
        ("int8", 2, (9, 1, 16, None, 3)), ("int8", 3, (3, 3, 16, 70, 2)),
        ("fp8", 1, (2, 1, 16, 64, 2)), ("fp8", 3, (4, 1, 16, None, 3)),
        ("fp16", 0, (3, 1, 16, 70, 2)), ("bf16", 0, (4, 2, 32, None, 3)),
    ],
)  # fmt: skip
@interpreted
def test_decode_attention(storage, dims, shape):
    q_heads, heads, dim, window, splits = shape
    inputs = make_inputs(storage, dims, heads, dim, sliding_window=window)
    check_decode(make_queries(len(LENGTHS), q_heads, dim), inputs, splits)


SINKS = torch.tensor([3.0, -2.0, 0.5, 30.0])


@pytest.mark.parametrize(
    ("storage", "dims", "shape", "changes"),
    [
        ("int8", 1, (4, 2, 256, None), {"softcap": 2.0}),
        ("int4", 3, (4, 1, 512, 70), {"sinks": SINKS}),
        ("int8", 3, (4, 1, 16, 70), {"softcap": 5.0, "sinks": SINKS}),
        ("fp16", 0, (4, 2, 96, 70), {"sinks": SINKS, "softmax_scale": 0.31}),
        ("fp8", 3, (4, 4, 80, None), {"alibi": 2.0 ** -torch.arange(1, 5)}),
        ("int8", 2, (4, 2, 48, 64), {"alibi": 2.0 ** -torch.arange(1, 5), "sinks": SINKS}),
    ],
)
@interpreted
def test_attention_of_heads_of_any_size_whose_logits_are_changed(storage, dims, shape, changes):
    """Bounded, biased or beside a sink, of which a run that is added to others has none."""
    q_heads, heads, dim, window = shape
    inputs = make_inputs(storage, dims, heads, dim, sliding_window=window, **changes)
    q = make_queries(69, q_heads, dim)
    few, plain = q[: len(LENGTHS)], replace(inputs, softcap=None, sinks=None, alibi=None)
    unlike = twins.decode_attention(few, plain)
    for splits in (1, 3):
        assert distance(unlike, check_decode(few, inputs, splits)) > 1e-2, "the change matters"
    check_prefill(q, inputs, 1, 32, (0, 1, 34, 34, 67, 69))


def with_sink_tokens(inputs: AttentionInputs, count: int) -> AttentionInputs:
    """The same with floats of the first tokens, of larger keys and values than the others."""
    pool, generator = inputs.pool, torch.Generator().manual_seed(5)
    size = pool.v.shape[2] * (2 if pool.v.dtype == torch.uint8 else 1)
    shape = (PAGES, pool.k.shape[1], count, size)
    k, v = (torch.randn(shape, generator=generator).bfloat16() * 4 for _ in "kv")
    return replace(inputs, pool=replace(pool, sink_k=k, sink_v=v))


@pytest.mark.parametrize(
    ("storage", "dims", "shape", "count", "changes"),
    [
        ("int8", 1, (4, 2, 32, None), 1, {}),
        ("int8", 2, (9, 1, 48, 130), 3, {"softcap": 5.0}),
        ("int8", 3, (4, 1, 16, 64), 4, {"sinks": SINKS}),
        ("int4", 3, (3, 1, 80, None), 2, {}),
        ("k8v4", 1, (4, 2, 16, None), 1, {}),
        ("k8v4", 3, (4, 1, 96, 199), 2, {"alibi": 2.0 ** -torch.arange(1, 5)}),
        ("fp8", 1, (2, 1, 16, None), 4, {}),
    ],
)
@interpreted
def test_sink_tokens_are_read_as_floats(storage, dims, shape, count, changes):
    q_heads, heads, dim, window = shape
    inputs = make_inputs(storage, dims, heads, dim, sliding_window=window, **changes)
    workspace, q = Workspace.on("cpu", 1 << 17, 64), make_queries(107, q_heads, dim)
    few, plain = q[: len(LENGTHS)], twins.decode_attention(q[: len(LENGTHS)], inputs)
    inputs = with_sink_tokens(inputs, count)
    for splits in (1, 3):
        assert distance(plain, check_decode(few, inputs, splits)) > 1e-2, "they matter"
    for decodes, tokens in ((0, 64), (1, 32)):
        check_prefill(q, inputs, decodes, tokens, STARTS)
    pool = inputs.pool
    for other in (replace(pool, sink_k=pool.sink_k[1:]), replace(pool, sink_v=None)):
        beside = replace(inputs, pool=other)
        refused("sink_. is .* beside pages with scales", decode_attention, few, beside, workspace)


@pytest.mark.parametrize("group", [2, 17])
@interpreted
def test_more_runs_than_are_added_at_once(group):
    inputs = make_inputs("bf16", 0, 1, 208)
    pages = torch.arange(11, dtype=torch.int32).remainder(PAGES)[None]
    inputs = replace(inputs, block_tables=pages, context_len=torch.tensor([700]).int())
    q, workspace = make_queries(1, group, 208), Workspace.on("cpu", 1 << 19, 64)
    got = decode_attention(q, inputs, workspace, split=KVSplit(4, 11))
    assert distance(got, twins.decode_attention(q, inputs)) < 8e-4


@pytest.mark.parametrize("window", [None, 130])
@interpreted
def test_runs_have_as_many_pages_as_the_split_says_at_least(window):
    """A sequence of no more is not cut: its bits are those of one run."""
    inputs = make_inputs("int8", 1, 2, 16, sliding_window=window)
    workspace = Workspace.on("cpu", 1 << 16, 64)
    q = make_queries(len(LENGTHS), 4, 16)
    whole, cut, halves = (
        decode_attention(q, inputs, workspace, split=KVSplit(4, splits, least=least))
        for splits, least in ((1, 1), (4, 1), (4, 2))
    )
    short = torch.tensor([length <= 128 for length in LENGTHS])
    assert torch.equal(halves[short], whole[short])
    assert not torch.equal(cut[short], whole[short])
    assert not torch.equal(halves[~short], whole[~short])
    assert distance(halves, twins.decode_attention(q, inputs)) < 8e-4


@pytest.mark.parametrize("splits", [1, 3])
@interpreted
def test_decode_attention_quantizes_its_result(splits):
    inputs, workspace = make_inputs("int8", 1, 2, 32), Workspace.on("cpu", 1 << 16, 64)
    q = make_queries(len(LENGTHS), 4, 32)
    scale, more = torch.tensor([0.011]), {"split": KVSplit(4, splits), "out_dtype": torch.int8}
    wanted = twins.decode_attention(q, inputs) / scale
    got = decode_attention(q, inputs, workspace, out_scale=scale, **more)
    assert got.dtype == torch.int8
    assert (wanted.abs() > 127).any(), "some are cut off"
    assert (got - wanted.clamp(-127, 127)).abs().max() < 0.52


@pytest.mark.parametrize(
    ("storage", "dims", "shape"),
    [
        ("int8", 1, (4, 1, 16, None, 0, 64)), ("int8", 2, (3, 1, 16, None, 0, 32)),
        ("int4", 1, (4, 1, 16, None, 1, 64)), ("int4", 3, (4, 1, 96, 70, 1, 32)),
        ("k8v4", 3, (4, 1, 48, None, 0, 64)), ("int8", 3, (4, 2, 16, 70, 1, 64)),
        ("fp8", 3, (2, 1, 16, None, 1, 64)), ("bf16", 0, (2, 1, 32, None, 0, 64)),
    ],
)  # fmt: skip
@interpreted
def test_prefill_attention(storage, dims, shape):
    q_heads, heads, dim, window, decodes, tokens = shape
    inputs = make_inputs(storage, dims, heads, dim, sliding_window=window)
    check_prefill(make_queries(107, q_heads, dim), inputs, decodes, tokens, STARTS)


@pytest.mark.parametrize(
    ("storage", "dims", "window", "changes"),
    [("int8", 1, None, {}), ("int8", 3, 1300, {"sinks": SINKS, "softcap": 5.0})],
)
@interpreted
def test_few_tokens_behind_many_share_their_pages(storage, dims, window, changes):
    """In runs of 1024 tokens or more, which the last program of a tile adds up."""
    small = make_inputs(storage, dims, 1, 16).pool
    tables = torch.randint(PAGES, (2, 24), generator=torch.Generator().manual_seed(2)).int()
    scales = [s.nan_to_num(0.02) for s in (small.k_scale, small.v_scale)]
    pool, more = KVPool(small.k, small.v, *scales, dynamic=dims == 3), {"sliding_window": window}
    lengths, starts = torch.tensor([1500, 40]).int(), torch.tensor([0, 20, 24]).int()
    inputs = AttentionInputs(pool, tables, lengths, starts, 0.25, **more, **changes)
    q = make_queries(24, 4, 16)
    wanted, workspace = twins.prefill_attention(q, inputs), Workspace.on("cpu", 1 << 15, 64)
    found = []
    for splits, own in ((1, workspace), (3, workspace), (3, Workspace.on("cpu", 1, 1))):
        tile = PrefillTile(64, 64, 4, 2, splits)
        found.append(prefill_attention(q, inputs, own, tile=tile))
        assert distance(found[-1], wanted) < 8e-4
        assert not own.arrivals.any()
    assert not torch.equal(found[0], found[1]), "sums are in another order"
    assert torch.equal(found[0], found[2]), "without room nothing is shared"


@interpreted
def test_prefill_attention_quantizes_and_refuses():
    workspace, starts = Workspace.on("cpu", 1, 1), torch.tensor([0, 1, 5, 5, 5, 5])
    inputs = make_inputs("int8", 1, 1, 16, query_start=starts)
    q = make_queries(5, 2, 16)
    one, dtype = torch.tensor([0.02]), torch.int8
    got = prefill_attention(q, inputs, workspace, out_scale=one, out_dtype=dtype)
    wanted = twins.prefill_attention(q, inputs) / one
    assert (got - wanted.clamp(-127, 127)).abs().max() < 0.52
    with pytest.raises(ValueError, match="query_start is"):
        prefill_attention(q, replace(inputs, query_start=starts[1:]), workspace)
    refused("query_start is", prefill_attention, q, replace(inputs, query_start=None), workspace)
    refused("6 of 5 sequences decode", prefill_attention, q, inputs, workspace, decodes=6)
    refused("float32 takes no out_scale", prefill_attention, q, inputs, workspace, out_scale=one)
    refused("int8 needs out_scale", prefill_attention, q, inputs, workspace, out_dtype=dtype)


@interpreted
def test_attention_refuses_what_does_not_fit():
    inputs = make_inputs("int8", 1, 2, 32)
    pool, k, v = inputs.pool, inputs.pool.k, inputs.pool.v
    q, workspace = torch.randn(len(LENGTHS), 4, 32), Workspace.on("cpu", 100, 1)
    for other, message in (
        (replace(pool, v=k), "tokens last"),
        (replace(pool, k=k.float(), v=v.float()), "needed is one of int8, float8_e4m3fn, bfloat16"),
        (replace(pool, k=k.half(), v=v.half()), "float16 has no scales"),
        (replace(pool, k_scale=None, v_scale=None), "int8 needs scales of K and of V"),
        (replace(pool, k_scale=pool.k_scale[:1]), "scales are"),
    ):
        refused(message, decode_attention, q, replace(inputs, pool=other), workspace)
    for changes, message in (
        ({"softcap": 0.0}, "softcap is 0.0; needed is a positive number"),
        ({"sinks": torch.zeros(2)}, r"sinks is .*; needed is fp32 \[4\]"),
        ({"alibi": torch.zeros(4).half()}, r"alibi is .*; needed is fp32 \[4\]"),
    ):
        refused(message, decode_attention, q, replace(inputs, **changes), workspace)
    odd = q[:, :, :24], make_inputs("int8", 1, 2, 24), workspace
    refused("head size 24 is not supported: multiples of 16 up to", decode_attention, *odd)
    refused("5 block tables for 4", decode_attention, q[:4], inputs, workspace)
    refused("make a larger one", decode_attention, q, inputs, workspace, split=KVSplit(4, 2))
    without = Workspace.on("cpu", 0, 0)  # sequences that are not split need none
    got = decode_attention(q, inputs, without, split=KVSplit(4, 1))
    assert distance(got, twins.decode_attention(q, inputs)) < 8e-4


def slots_of(tokens: int, kind: str) -> torch.Tensor:
    """Anywhere; or runs: one from a place in a page on over its end, and its last tokens absent."""
    if kind == "anywhere":
        slots = torch.randperm(6 * 64, generator=torch.Generator().manual_seed(3))[:tokens]
        slots[3] = -1
        return slots
    place = torch.arange(tokens) + int(kind)
    slots = torch.tensor([4, 0, 5, 2, 1, 3])[place // 64] * 64 + place % 64
    slots[-2:] = -1
    return slots


@pytest.mark.parametrize(
    ("storage", "dims", "tokens", "kind", "norm", "dim"),
    [
        ("int8", 1, 21, "anywhere", False, 16),
        ("int8", 1, 21, "anywhere", True, 16),
        ("int8", 2, 21, "anywhere", True, 16),
        ("int8", 3, 21, "anywhere", False, 16),
        ("int8", 3, 258, "anywhere", True, 16),  # from here on 64 tokens, two heads a program
        ("int8", 1, 258, "0", False, 16),
        ("int8", 3, 258, "37", True, 16),
        ("fp16", 0, 258, "48", False, 16),
        ("bf16", 0, 21, "anywhere", True, 16),
        ("int8", 2, 21, "anywhere", True, 48),
        ("int8", 3, 258, "37", True, 80),
        ("fp16", 0, 258, "37", False, 96),
        ("int4", 1, 21, "anywhere", False, 16),
        ("int4", 2, 21, "anywhere", True, 80),
        ("int4", 3, 258, "37", True, 128),
        ("int4", 3, 258, "0", False, 96),
        ("int4 compensated", 3, 21, "anywhere", False, 96),
        ("int4 compensated", 3, 258, "37", True, 64),
        ("k8v4", 3, 258, "anywhere", False, 64),
    ],
)
@interpreted
def test_rotation_and_cache_write(storage, dims, tokens, kind, norm, dim):
    heads, generator, packed = 2, torch.Generator().manual_seed(2), "4" in storage
    storage, _, compensated = storage.partition(" ")
    joint = torch.randn(tokens, 8, dim, generator=generator).half()
    q, k, v = joint.split([4, heads, heads], dim=1)
    angle = (torch.rand(tokens, dim // 2, generator=generator) * 6).repeat(1, 2)
    slots = slots_of(tokens, kind)
    shape = {0: (), 1: (heads,), 2: (heads, dim), 3: (6, heads, 64)}[dims]
    more = {}
    if norm:
        more = {f"{x}_norm": torch.rand(dim, generator=generator) + 0.5 for x in "qk"}
        more |= {"positions": torch.randperm(tokens, generator=generator), "eps": 1e-3}
        more |= {"out_dtype": torch.float32, "growth": torch.rand(tokens, generator=generator)}
    found = []
    for write in (rope_write, twins.rope_write):
        pools = pages_of(storage, *(torch.zeros(6, heads, *s) for s in ((64, dim), (dim, 64))))
        scales = [torch.full(shape, 0.3 if packed else 0.02) if dims else None for _ in "kv"]
        scales[1] = scales[1] if dims != 2 else scales[1][:, 0].contiguous()
        extra = {}
        if packed:
            scales = [scale.half() for scale in scales] if dims == 3 else scales
            offset = torch.rand(heads, dim, generator=torch.Generator().manual_seed(3))
            extra = {"turn": dim & -dim, "k_offset": offset}
        if dims:  # sink tokens stand anywhere among these
            held = [torch.zeros(6, heads, 3, dim, dtype=torch.bfloat16) for _ in "kv"]
            places = (torch.arange(tokens) * 5 + 2) % tokens
            extra |= {"sink_k": held[0], "sink_v": held[1]}
            more["places"] = places
        if compensated:
            queries = torch.randn(heads, 3 * dim, dim, generator=torch.Generator().manual_seed(4))
            extra["k_feedback"] = feedback_of(queries.mT @ queries, dim & -dim)
        pool = KVPool(*pools, *scales, dynamic=dims == 3, **extra)
        out = write(q, k, v, angle.cos(), angle.sin(), pool, slots, **more)
        sinks = (extra["sink_k"], extra["sink_v"]) if dims else ()
        found.append((out, *pools, *scales, *sinks))
    got, wanted = (list(each) for each in found)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-3, atol=1e-3)
    for sinks, exact in zip(got[5:], wanted[5:], strict=True):
        assert exact.any()
        torch.testing.assert_close(sinks, exact, rtol=2**-7, atol=1e-3)
    assert got[2].any()
    if dims == 0:  # the interpreter cuts bf16 off where torch rounds
        near = {"rtol": 2**-7, "atol": 1e-5} if storage == "bf16" else {"rtol": 1e-3, "atol": 1e-5}
        torch.testing.assert_close(got[1:3], wanted[1:3], **near)
        return
    if storage == "int4":
        got[1], wanted[1] = (unpack_halves(pages) for pages in (got[1], wanted[1]))
    assert (got[1].int() - wanted[1].int()).abs().max() <= 1
    assert (got[1] != wanted[1]).float().mean() < 1e-3
    assert torch.equal(got[2], wanted[2])
    torch.testing.assert_close(got[3], wanted[3], rtol=1e-6, atol=0)
    assert torch.equal(got[4], wanted[4])


@pytest.mark.parametrize("dim", [16, 24])
@interpreted
def test_heads_are_turned_by_halves(dim):
    q, k, _ = torch.randn(5, 8, dim).split([4, 2, 2], dim=1)  # rows are parts of longer ones
    angle = torch.randn(5, dim // 2).repeat(1, 2)
    found, wanted = (f(q, k, angle.cos(), angle.sin()) for f in (rotate, apply_rope))
    for x, y in zip(found, wanted, strict=True):
        assert x.is_contiguous()
        assert torch.allclose(x, y, atol=1e-5)
    some = torch.randn(5, 5).repeat(1, 2)
    found = rotate(q, k, some.cos(), some.sin())
    wanted = apply_rope(q[..., :10], k[..., :10], some.cos(), some.sin())
    for own, whole, x in zip(found, wanted, (q, k), strict=True):
        assert torch.allclose(own[..., :10], whole, atol=1e-5)
        assert torch.equal(own[..., 10:], x[..., 10:])
    refused("cos is", rotate, q, k, angle[:4].cos(), angle[:4].sin())


@interpreted
def test_cache_write_refuses_what_does_not_fit():
    x, angle, slots = torch.zeros(3, 6, 16), torch.zeros(3, 16), torch.zeros(3, dtype=torch.int32)
    pages = [torch.zeros(1, 2, *s, dtype=torch.int8) for s in ((64, 16), (16, 64))]
    pool = KVPool(*pages, torch.ones(2), torch.ones(2))
    q, k, v = x.split([2, 2, 2], dim=1)
    refused("k is", rope_write, q, k[:, :1], v, angle, angle, pool, slots)
    with pytest.raises(ValueError, match=r"sin is .2, 16.; needed is contiguous .3, 16."):
        rope_write(q, k, v, angle, angle[:2], pool, slots)
    with pytest.raises(ValueError, match=r"slots is .2,.; needed is contiguous .3,."):
        rope_write(q, k, v, angle, angle, pool, slots[:2])
    with pytest.raises(ValueError, match="q_norm and k_norm"):
        rope_write(q, k, v, angle, angle, pool, slots, q_norm=torch.ones(16))
    refused("needs scales", rope_write, q, k, v, angle, angle, KVPool(*pages), slots)
    fed = replace(pool, k_feedback=torch.zeros(2, 16, 16))
    refused("int4 keys with dynamic scales", rope_write, q, k, v, angle, angle, fed, slots)
