"""GPU kernels on a GPU: integers exactly, floats within bounds of fp64, nothing NaN, same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kernels.reference as reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available():
    import kernels.triton.reference as twins
    from kernels.bench import case, gpu_cases
    from kernels.op_inputs import AttentionInputs, KVPool
    from kernels.packed_cache import pack_halves, unpack_halves
    from kernels.triton import fused
    from kernels.triton.attention.decode import decode_attention
    from kernels.triton.attention.prefill import prefill_attention
    from kernels.triton.attention.rope_cache import rope_write
    from kernels.triton.linear.w8a8 import pack_w8a8
    from kernels.triton.linear.w16a16 import GEMV, DenseWeight
    from kernels.triton.linear.weight_only import pack_w4a16
    from kernels.triton.tuning import KVSplit, PrefillTile, Tile

ROWS = (1, 33, 64, 300, 600)
FP8 = "float8_e4m3fn"
PACKED = ("int4", "k8v4")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def type_of(storage: str) -> torch.dtype | str:
    """torch's type of a cache; those with int4 have none."""
    return storage if storage in PACKED else getattr(torch, storage)


def integers(*shape: int, top: int = 127) -> torch.Tensor:
    return torch.randint(-top, top + 1, shape, dtype=torch.int8, device="cuda")


@pytest.mark.parametrize("family", ["w4a16", "w4a8", "w8a8", "fp8", "w16a16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_linear_layers_equal_their_fp64_twins(family, dtype, workspace):
    for rows in ROWS:
        for outputs, inputs in ((6144, 4096), (192, 1408)):
            gpu_cases.gemm(family, rows, outputs, inputs, workspace, dtype).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_w8a8_equals_its_twin_bit_for_bit(dtype, workspace):
    q, scale = integers(768, 2048), torch.rand(768, device="cuda") * 0.01
    bias = torch.randn(768, device="cuda")
    tiles = [None, *(Tile(128, 16, splits) for splits in (1, 2, 5))]
    for rows in (1, 17, 300):
        x = integers(rows, 2048)
        for own in (torch.rand(rows, 1, device="cuda"), torch.tensor([0.03], device="cuda")):
            wanted = reference.int8_linear(
                *(t.cpu() for t in (x, own, q, scale, bias)), out_dtype=dtype
            )
            for tile in tiles:
                weight = pack_w8a8(q, scale, bias)
                got = weight.run(x, own, workspace, dtype, tile=tile)
                assert torch.equal(got.cpu(), wanted), (rows, tile)


def test_16_bit_weights_give_the_same_bits_every_time_and_logits_their_own_type(workspace):
    sizes = ((6144, 1024), (1024, 4096), (192, 384), (128256, 512), (32, 2880), (180, 576))
    for outputs, inputs in sizes:
        w = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16)
        for rows, splits in ((1, 1), (8, 1), (16, 2), (50, 3)):
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            wanted = twins.float_linear(x, w, bias)
            weight = DenseWeight(w, bias)
            for tile in (weight.few_rows_tile(x), Tile(64, 16, splits if outputs < 2**16 else 1)):
                args = x, None, workspace, torch.float32, None, tile
                first = weight.run(*args)
                assert case.relative(first, wanted) < 1e-4, (rows, outputs, tile)
                assert all(torch.equal(weight.run(*args), first) for _ in range(10))
                assert not workspace.arrivals.any()
            got = weight.run(x, None, workspace, torch.float32)
            assert case.relative(got, wanted) < 1e-4, (rows, outputs)
            assert (weight.tile(x, x.dtype, None) == GEMV) == (rows < 17 and rows * outputs <= 3072)


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_splits_give_the_same_bits_every_time_and_in_any_batch(splits, workspace):
    q, scale = integers(512, 4096, top=7), torch.rand(512, 32, device="cuda").half()
    weight, tile = pack_w4a16(q, scale), Tile(64, 16, splits)
    x = torch.randn(16, 4096, device="cuda").half()
    first = weight.run(x, None, workspace, x.dtype, tile=tile)
    for _ in range(20):
        assert torch.equal(weight.run(x, None, workspace, x.dtype, tile=tile), first)
    for rows in (1, 3, 15):
        assert torch.equal(weight.run(x[:rows], None, workspace, x.dtype, tile=tile), first[:rows])
    assert not workspace.arrivals.any()


SINKS = ("sink_k", "sink_v")


def random_inputs(
    dtype, kind, heads=4, dim=128, pages=64, lengths=(1, 63, 0, 64, 65, 700, 1024), **rest
):
    pools = [
        (torch.randn(pages, heads, 64, dim, device="cuda") * 60).clamp(-127, 127) for _ in "kv"
    ]
    pools[1] = pools[1].transpose(2, 3).contiguous()
    if dtype not in PACKED:
        pools = [pool.to(dtype) for pool in pools]
    if dtype in PACKED:
        pools = [pool.long().fmod(8).to(torch.int8) for pool in pools]
        packed = pack_halves(pools[1].transpose(2, 3)).transpose(2, 3).contiguous()
        pools = [pools[0] if dtype == "k8v4" else pack_halves(pools[0]), packed]
    shapes = {"none": (), "head": (heads,), "channel": (heads, dim), "token": (pages, heads, 64)}
    scales = [torch.rand(shapes[kind], device="cuda") * 0.01 + 0.01 for _ in "kv"]
    if kind == "none":
        pools, scales = [pool * 0.015 for pool in pools], [None, None]
    if kind == "channel":
        scales[1] = scales[1][:, 0].contiguous()
    if dtype in PACKED and kind == "token":  # of int4 they are fp16 of either sign
        signs = (torch.randn(shapes[kind], device="cuda").sign() for _ in "kv")
        scales = [(12 * scale * sign).half() for scale, sign in zip(scales, signs, strict=True)]
    width = max(lengths) // 64
    tables = torch.stack([torch.randperm(pages, device="cuda")[:width] for _ in lengths]).int()
    pool = KVPool(*pools, *scales, dynamic=kind == "token")
    lengths = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    rest = {"query_start": None, "softmax_scale": dim**-0.5, **rest}
    return AttentionInputs(pool, tables, lengths, **rest)


@pytest.mark.parametrize(
    ("storage", "kind"),
    [
        *(
            (storage, kind)
            for storage in ("int8", FP8, "int4", "k8v4")
            for kind in ("head", "token", "channel")
        ),
        ("bfloat16", "none"),
        ("float16", "none"),
    ],
)
@pytest.mark.parametrize("stages", [0, 3])  # 0: stated layouts, where they fit
def test_decode_attention_of_ragged_sequences(stages, kind, storage, workspace):
    for group in (1, 3, 8):
        inputs = random_inputs(type_of(storage), kind)
        if kind == "token":  # what nobody wrote, of tokens past the end, must not matter
            for s, length in enumerate(inputs.context_len.tolist()):
                page, place = inputs.block_tables[s, min(length // 64, 15)], length % 64
                alone = (inputs.block_tables == page).sum() == 1
                if alone and length < 1024:
                    for scale in (inputs.pool.k_scale, inputs.pool.v_scale):
                        scale[page, :, place:] = float("nan")
        q = torch.randn(7, 4 * group, 128, device="cuda", dtype=torch.bfloat16)
        wanted = twins.decode_attention(q, inputs)
        for split in (None, *(KVSplit(*n, stages) for n in ((2, 1), (4, 3), (2, 16)))):
            got, again = (decode_attention(q, inputs, workspace, split=split) for _ in "ab")
            assert case.relative(got, wanted) < 4e-3, (group, split)
            assert not got[2].any()
            assert torch.equal(got, again)
            assert not workspace.arrivals.any()


@pytest.mark.parametrize(
    ("storage", "kind", "dim", "window", "count"),
    [
        ("int8", "head", 128, None, 1),
        (FP8, "head", 128, None, 4),
        ("int8", "token", 128, 1000, 2),
        ("int4", "token", 128, None, 1),
        ("k8v4", "token", 128, None, 3),
        ("k8v4", "head", 128, None, 1),
        ("int8", "channel", 128, None, 1),
        ("int8", "head", 64, None, 4),
        ("int4", "token", 256, 650, 1),
    ],
)
def test_sink_tokens_are_read_as_floats(storage, kind, dim, window, count, workspace):
    lengths, counts = (1, 2, 63, 0, 65, 700, 1024, 1024), (1, 1, 3, 0, 65, 333, 1024, 17)
    inputs = random_inputs(
        type_of(storage), kind, dim=dim, lengths=lengths, pages=128, sliding_window=window
    )
    shape = (128, 4, count, dim)
    held = (torch.randn(shape, device="cuda").bfloat16() * 3 for _ in "kv")
    inputs = replace(inputs, pool=replace(inputs.pool, **dict(zip(SINKS, held, strict=True))))
    q = torch.randn(sum(counts), 16, dim, device="cuda", dtype=torch.bfloat16)
    wanted = twins.decode_attention(q[: len(lengths)], inputs)
    wide = dim > 128
    for stages in (0, 3):
        for splits, least in ((2, 1), (4, 3), (1, 1)):
            split = KVSplit(splits, least, stages)
            got = decode_attention(q[: len(lengths)], inputs, workspace, split=split)
            assert case.relative(got, wanted) < 4e-3, split
            assert not got[3].any()
    inputs = replace(inputs, query_start=torch.tensor((0, *counts), device="cuda").cumsum(0).int())
    wanted = twins.prefill_attention(q, inputs)
    for rows, stages, decodes in ((64, 3, 0), (128, 3, 2), (128, 0, 0), (128, 0, 2)):
        tile = PrefillTile(rows, 32 if wide else 64, 8 if wide else max(4, rows // 16), stages)
        got = prefill_attention(q, inputs, workspace, decodes, tile=tile)
        each = (got - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
        assert each.max() < 2e-2, (tile, each.argmax())


@pytest.mark.parametrize("result", ["int8", FP8])
@pytest.mark.parametrize("stages", [0, 3])
def test_attention_quantizes_its_result(stages, result, workspace):
    starts, dtype = torch.arange(8, device="cuda"), getattr(torch, result)
    starts[3:] -= 1  # the sequence of length 0 has no query
    inputs = random_inputs(torch.int8, "head", query_start=starts, softmax_scale=0.1)
    q = torch.randn(7, 16, 128, device="cuda", dtype=torch.bfloat16)
    scale = torch.tensor([0.004], device="cuda")
    more = {"out_scale": scale, "out_dtype": dtype}
    splits = [{"split": KVSplit(2, splits, stages)} for splits in (1, 4)]
    tiles = [{"tile": PrefillTile(128, 64, 8, stages)}]
    for attend, queries, shapes in (
        (decode_attention, q, splits),
        (prefill_attention, q[:6], tiles),
    ):
        for shape in shapes:
            plain = attend(queries.float(), inputs, workspace, **shape).cpu()  # exact divisions
            wanted = twins.quantize_rows(plain, scale.cpu(), dtype)[0]
            close_integers(attend(queries, inputs, workspace, **more, **shape).cpu(), wanted)


@pytest.mark.parametrize(
    ("storage", "kind", "dim", "group", "window"),
    [
        ("int8", "head", 128, 4, None),
        ("int8", "head", 128, 7, 100),
        ("int8", "token", 128, 4, None),
        ("int8", "channel", 64, 1, None),
        (FP8, "head", 128, 8, None),
        (FP8, "token", 256, 4, 100),
        ("bfloat16", "none", 128, 4, None),
        ("float16", "none", 16, 3, None),
        ("int4", "head", 128, 4, None),
        ("int4", "token", 128, 4, 100),
        ("k8v4", "token", 128, 8, None),
        ("int4", "token", 64, 8, None),
        ("int4", "token", 96, 1, None),
    ],
)
def test_prefill_attention_of_ragged_sequences(storage, kind, dim, group, window, workspace):
    lengths, counts = (1, 63, 0, 64, 65, 700, 1024, 1024), (1, 1, 0, 64, 1, 333, 1024, 17)
    starts = torch.tensor((0, *counts), device="cuda").cumsum(0).int()
    rest = {"pages": 128, "query_start": starts, "sliding_window": window}
    inputs = random_inputs(type_of(storage), kind, dim=dim, lengths=lengths, **rest)
    q = torch.randn(sum(counts) + 3, 4 * group, dim, device="cuda", dtype=torch.bfloat16)
    wanted = twins.prefill_attention(q, inputs)[:-3]
    tokens, wide = (64, 0) if dim <= 128 else (32, 4)
    for rows, stages, decodes in ((64, 3, 0), (128, 3, 2), (128, 0, 0), (128, 0, 2)):
        tile = PrefillTile(rows, tokens, max(4, rows // 16, 2 * wide), stages)
        got, again = (
            prefill_attention(q, inputs, workspace, decodes, tile=tile)[:-3] for _ in "ab"
        )
        assert case.relative(got, wanted) < 4e-3, tile
        each = (got - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
        assert each.max() < 2e-2, (tile, each.argmax())
        assert torch.equal(got, again)


@pytest.mark.parametrize("window", [1, 100])
def test_a_sliding_window_and_other_head_sizes(window, workspace):
    for dim in (64, 128):
        inputs = random_inputs(torch.int8, "head", dim=dim, sliding_window=window)
        q = torch.randn(7, 12, dim, device="cuda", dtype=torch.float16)
        wanted = twins.decode_attention(q, inputs)
        for splits in (1, 4):
            got = decode_attention(q, inputs, workspace, split=KVSplit(2, splits))
            assert case.relative(got, wanted) < 1e-3


def test_a_graph_replays_what_was_captured(workspace):
    inputs = random_inputs(torch.int8, "head")
    q = torch.randn(7, 16, 128, device="cuda", dtype=torch.bfloat16)
    run = lambda: decode_attention(q, inputs, workspace, split=KVSplit(2, 4))  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for length in (0, 5, 1024):
        inputs.context_len.fill_(length)  # lengths are read on the device
        graph.replay()
        assert torch.equal(out, run())


def close_integers(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for ties that another order of a sum decides: at most one in a thousand, by one."""
    off = (got.float() - wanted.float()).abs()
    if got.dtype == torch.int8:
        assert off.max() <= 1
    assert (off > 0).float().mean() < 1e-3


@pytest.mark.parametrize("storage", ["int8", FP8, "bfloat16"])
@pytest.mark.parametrize("size", [200, 14336])
def test_fused_rows_equal_their_twins(storage, size):
    dtype = getattr(torch, storage)
    x, other = (torch.randn(33, size, device="cuda").bfloat16() for _ in "ab")
    weight = torch.rand(size, device="cuda")
    gate_up = torch.randn(33, 2 * size, device="cuda").bfloat16()
    gate_up[5] = 0
    static = torch.tensor([0.02], device="cuda")
    for scale in (None, static) if storage != "bfloat16" else (None,):
        pairs = [
            (
                f.add_rms_norm(x, other, weight, 1e-6, scale, dtype),
                f.gated_product(gate_up, scale, dtype),
            )
            for f in (fused, twins)
        ]
        for got, wanted in zip(*pairs, strict=True):
            close_integers(got[0], wanted[0])
            if got[1] is not None:
                torch.testing.assert_close(got[1], wanted[1], rtol=1e-5, atol=0)
        assert torch.equal(pairs[0][0][2], pairs[1][0][2])


@pytest.mark.parametrize(
    ("storage", "kind"),
    [
        *((storage, kind) for storage in ("int8", FP8, "int4") for kind in (1, 2, 3)),
        ("k8v4", 3),
        ("bfloat16", 0),
    ],
)
@pytest.mark.parametrize(("start", "dim"), [(None, 128), (0, 64), (16, 128), (37, 96)])
def test_cache_write_equals_its_twin(storage, kind, start, dim):
    heads, pages, packed = 2, 8, storage in PACKED
    tokens = 77 if start is None else 400
    qkv = torch.randn(tokens, 12, dim, device="cuda").bfloat16()
    angle = (torch.rand(500, dim // 2, device="cuda") * 6).repeat(1, 2)
    slots = torch.randperm(pages * 64, device="cuda")[:tokens]
    if start is not None:  # a run over pages in any order
        place = torch.arange(tokens, device="cuda") + start
        slots = torch.randperm(pages, device="cuda")[place // 64] * 64 + place % 64
    slots[3] = -1
    shape = {0: (), 1: (heads,), 2: (heads, dim), 3: (pages, heads, 64)}[kind]
    more = {}
    if start:
        more = {f"{x}_norm": torch.rand(dim, device="cuda") + 0.5 for x in "qk"}
        more |= {"positions": torch.randperm(500, device="cuda")[:tokens]}
    found = []
    for write, device in ((rope_write, "cuda"), (twins.rope_write, "cpu")):  # exact divisions
        qkv, slots = (t.to(device) for t in (qkv, slots))
        cos, sin = (t[: 500 if start else tokens].to(device) for t in (angle.cos(), angle.sin()))
        of_k, of_v = dim // 2 if storage == "int4" else dim, dim // 2 if packed else dim
        types = [type_of(storage)] * 2
        if packed:
            types = [torch.int8 if storage == "k8v4" else torch.uint8, torch.uint8]
        pools = [
            torch.zeros(pages, heads, *own, device=device).to(held)
            for own, held in zip(((64, of_k), (of_v, 64)), types, strict=True)
        ]
        step = 0.3 if packed else 0.03
        scales = [torch.full(shape, step, device=device) if kind else None for _ in "kv"]
        extra = {}
        if packed:
            scales = [scale.half() for scale in scales] if kind == 3 else scales
            offset = torch.linspace(0, 1, heads * dim, device=device).view(heads, dim)
            extra = {"turn": dim & -dim, "k_offset": offset}
        elif kind and storage == "fp8":
            offset = torch.linspace(0, 1, heads * dim, device=device).view(heads, dim)
            extra = {"k_offset": offset}
        if kind:
            places = ((torch.arange(tokens) * 5 + 2) % tokens).to(device)
            for name in SINKS:
                extra[name] = torch.zeros(pages, heads, 3, dim, dtype=torch.bfloat16, device=device)
        if kind == 2:
            scales[1] = scales[1][:, 0].contiguous()
        q, k, v = qkv.split([8, heads, heads], dim=1)
        moved = {name: x.to(device) for name, x in more.items()}
        pool = KVPool(*pools, *scales, dynamic=kind == 3, **extra)
        out = write(q, k, v, cos, sin, pool, slots, **moved, **({"places": places} if kind else {}))
        found.append((out, *pools, *scales, *(extra[name] for name in SINKS if kind)))
    got, wanted = ([t if t is None else t.cpu() for t in parts] for parts in found)
    assert case.relative(got[0], wanted[0].double()) < 4e-3
    if kind == 0:
        assert case.relative(got[1], wanted[1].double()) < 1e-3
        assert torch.equal(got[2], wanted[2])
        return
    if storage == "int4":
        got[1], wanted[1] = unpack_halves(got[1]), unpack_halves(wanted[1])
    close_integers(got[1], wanted[1])
    assert torch.equal(got[2].float(), wanted[2].float())
    near = 1e-3 if packed else 1e-5  # a scale in fp16 may be its neighbour
    torch.testing.assert_close(got[3], wanted[3], rtol=near, atol=0)
    assert torch.equal(got[4], wanted[4])
    for sinks, exact in zip(got[5:], wanted[5:], strict=True):
        assert exact.any()
        torch.testing.assert_close(sinks, exact, rtol=2**-7, atol=1e-3)
