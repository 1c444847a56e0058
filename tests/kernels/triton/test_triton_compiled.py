"""What GPU kernels become for sm_80, sm_89 and sm_90: tensor cores where meant, nothing spilled."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from kernels.op_inputs import AttentionInputs, KVPool
from kernels.triton import common, tuning
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.paged_cache import check_fp8
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.attention.rope_cache import rope_write
from kernels.triton.common import Workspace
from kernels.triton.fused import add_rms_norm, gated_product, quantize_rows
from kernels.triton.linear import w4a8, w8a8, weight_only
from kernels.triton.linear.fp4 import pack_fp4
from kernels.triton.linear.fp8_block import pack_fp8_block
from kernels.triton.linear.w4a8 import pack_w4a8
from kernels.triton.linear.w8a8 import pack_w8a8
from kernels.triton.linear.w16a16 import GEMV, DenseWeight
from kernels.triton.linear.weight_only import pack_w4a16, pack_w8a16
from kernels.triton.norms import norm_projections
from kernels.triton.sampling.logits import softcap_logits
from kernels.triton.tuning import KVSplit, PrefillTile, Tile, prefill_rule
from tests.kernels.triton_lab import SHARED, building_for, compiled, fitting

EVERY = pytest.mark.every_triton
CAPABILITIES = [80, 89, pytest.param(90, marks=EVERY)]
FP8 = torch.float8_e4m3fn
MMA = r"mma\.sync\S*{}"
WGMMA = r"wgmma\.mma_async\S*{}"
WAIT, ANNOUNCE = r"griddepcontrol\.wait", r"griddepcontrol\.launch_dependents"


def expected(capability: int, kind: str) -> str:
    """The tensor-core instruction of a product, by its operands' type."""
    return (WGMMA if capability == 90 else MMA).format(kind)


@pytest.mark.parametrize("capability", CAPABILITIES)
@compiled
def test_linear_layers(capability):
    workspace = Workspace.on("cpu", 1 << 20, 64)
    q, scale = torch.zeros(256, 1024, dtype=torch.int8), torch.ones(256, 8)
    x, one = torch.zeros(16, 1024, dtype=torch.int8), torch.ones(1)
    ordinary = 1 + torch.arange(2048).reshape(256, 8) / 8192
    w4, w8 = pack_w4a8(q, ordinary), pack_w8a8(q, scale[:, 0])
    hopper = capability == 90
    calls = []
    for dtype, kind, tile in (
        (torch.float16, r"f16\.f16", Tile(64, 64, 2, 3)),
        (torch.bfloat16, r"bf16\.bf16", Tile(256, 16, 1, 5 if hopper else 3)),
    )[: 2 if hopper else 1]:
        weight, own = pack_w4a16(q, scale.to(dtype)), x.to(dtype)
        calls.append(
            (kind, lambda w=weight, y=own, t=tile: w.run(y, None, workspace, y.dtype, tile=t))
        )
        calls.append(("", lambda w=weight, d=dtype: w.dequantize(d)))
    for tile in (Tile(64, 16, 4, 4), Tile(256, 16, 1, 5))[: 2 if hopper else 1]:
        calls.append((r"s8\.s8", lambda t=tile: w4.run(x, one, workspace, tile=t)))
    calls.append((r"s8\.s8", lambda: w8.run(x, one, workspace, tile=Tile(64, 16, 3, 4))))
    if capability >= 89:
        f8, own8 = pack_w8a8(q.to(FP8), scale[:, 0]), x.to(FP8)
        tile8 = Tile(64, 16, 3, 3)
        calls.append((r"e4m3\.e4m3", lambda: f8.run(own8, one, workspace, tile=tile8)))
    for kind, call in calls:
        with building_for(capability) as built:
            call()
        (binary,) = fitting(built, shared=SHARED if hopper else 101376)
        overlapped = hopper and bool(kind)
        assert binary.count(WAIT) == binary.count(ANNOUNCE) == overlapped, (
            "dequantize waits for all"
        )
        assert not kind or binary.count(expected(capability, kind)), (kind, capability)
        assert not hopper or not binary.count(MMA.format(""))


@pytest.mark.parametrize("capability", CAPABILITIES)
@compiled
def test_weights_of_16_bits(capability):
    """Tiles of the rule, which fit; loads run ahead, by TMA where there is one, and of GEMVs."""
    hopper, workspace = capability == 90, Workspace.on("cpu", 1 << 20, 64)
    values = torch.zeros(512, 4096).bfloat16()
    weight = DenseWeight(values, values[:, 0].contiguous())
    for rows in (1, 16, 64):
        x = torch.zeros(rows, 4096).bfloat16()
        with building_for(capability) as built:
            tile = weight.few_rows_tile(x)
            weight.run(x, None, workspace, torch.float32, tile=tile)
        (binary,) = fitting(built, shared=SHARED if hopper else 101376)
        assert binary.count(expected(capability, r"bf16\.bf16"))
        ahead = binary.count(r"cp\.async\.bulk\.tensor" if hopper else r"cp\.async\.c[ag]")
        assert ahead >= 6 if hopper else ahead > 32, "no loads run ahead"
        assert binary.count(WAIT) == binary.count(ANNOUNCE) == hopper
    with building_for(capability) as built:
        weight.run(x, None, workspace, torch.float32, tile=GEMV)
    (binary,) = fitting(built, registers=128)
    assert binary.ptx.partition("griddepcontrol.wait")[0].count("ld.global.v4") == 8 - 4 * hopper


@pytest.mark.parametrize(
    ("capability", "processors", "rows"), [(89, 128, 16), (120, 2, 16), (120, 2, 64)]
)
@compiled
def test_tiles_of_the_rule_fit_where_shared_memory_is_small(capability, processors, rows):
    """As on Ada, Ampere but A100, and small Blackwells: many and few outputs, by the rule."""
    q, ones = torch.zeros(512, 4096, dtype=torch.int8), torch.ones(512, 1)
    w16 = DenseWeight(q.bfloat16(), None)
    w8, f8 = pack_w8a16(q, ones), pack_w8a8(q.to(FP8), ones)
    blocks, of_runs = pack_fp8_block(q.to(FP8), torch.ones(4, 32)), torch.ones(64, 32)
    fine = pack_w8a16(q, torch.ones(512, 128), None, q[:, ::32].contiguous())
    workspace, one = Workspace.on("cpu", 1 << 20, 64), torch.ones(1)
    w4 = pack_w4a8(q, 1 + torch.rand(512, 32), None, torch.ones(512, 32, dtype=torch.int8))
    deep = {"outputs": 256, "rows": 16, "stages": 5}  # measured without zero points
    table = {"w4a8": {"512x4096": {"16": deep}}}
    x = torch.zeros(rows, 4096).bfloat16()
    with (
        patch.object(common, "shared_memory", lambda device: 101376),
        patch.object(weight_only, "shared_memory", lambda device: 101376),
        patch.object(w4a8, "shared_memory", lambda device: 101376),
        patch.object(tuning, "_table", lambda path: table),
        patch.object(tuning, "multiprocessors", lambda device, n=processors: n),
        patch.object(w8a8, "multiprocessors", lambda device, n=processors: n),
        building_for(capability) as built,
    ):
        tuning.gemm_tile.cache_clear()
        w8a8.tile_of.cache_clear()
        w16.run(x, None, workspace, tile=w16.few_rows_tile(x))
        w8.run(x, None, workspace)
        fine.run(x, None, workspace)
        w4.run(x.to(torch.int8), one, workspace)
        f8.run(x.to(FP8), one, workspace)
        blocks.run(x.to(FP8), of_runs[:rows], workspace)
    assert len(built) == 6
    for binary in built:
        assert binary.shared <= 101376, binary.shared
    tuning.gemm_tile.cache_clear()
    w8a8.tile_of.cache_clear()


@compiled
def test_weights_go_to_the_tensor_cores_through_registers():
    """No conversion of a 4-bit weight by shared memory: nothing is stored there but by loads."""
    q, scale = torch.zeros(256, 1024, dtype=torch.int8), torch.ones(256, 8)
    x, tile = torch.zeros(16, 1024).half(), Tile(128, 16, 1, 5)
    with building_for(90) as built:
        pack_w4a16(q, scale).run(x, None, Workspace.on("cpu", 1, 1), x.dtype, tile=tile)
    assert built[0].count(r"st\.shared|stmatrix") <= 8, "the result's alone"
    assert built[0].count(r"wgmma\.mma_async\S*f16\.f16 +\{[^}]*\}, *\{"), "left from registers"


@pytest.mark.parametrize(("capability", "warps"), [(80, 4), (90, 2)])
@compiled
def test_warps_shuffle_no_weight(capability, warps):
    """Inputs are multiplied in the order in which a thread has those of a stored tile."""
    q, x = torch.zeros(256, 1024, dtype=torch.int8), torch.zeros(16, 1024).half()
    codes, scale, workspace = q.view(torch.uint8), torch.ones(256, 8), Workspace.on("cpu", 1, 1)
    made = [pack_w4a16(q, scale), pack_w8a16(q, scale), pack_w4a8(q, scale * torch.rand(256, 8))]
    made += [pack_w4a8(q, scale), pack_fp4(codes, torch.ones(256, 32), None, torch.float16)]
    for weight in made:
        integers = weight.family.startswith("w4a8")
        rows, one = (x.to(torch.int8), torch.ones(1)) if integers else (x, None)
        with building_for(capability) as built:
            weight.run(rows, one, workspace, x.dtype, tile=Tile(64, 16, 1, 4, warps))
        (binary,) = fitting(built)
        assert binary.count(r"mma\.sync")
        assert not binary.count(r"shfl\."), weight.family


def make_pool(storage: torch.dtype, dims: int, dim: int = 128):
    """A pool of 8 KV heads with scales of so many dimensions, none for 0.

    uint8 turns its keys, and rounds them with feedback where each token has its scales.
    """
    packed = storage == torch.uint8
    held = dim // 2 if packed else dim
    pages = [torch.zeros(4, 8, *s).to(storage) for s in ((64, held), (held, 64))]
    shape = {0: (), 1: (8,), 3: (4, 8, 64)}[dims]
    scales = [torch.ones(shape) if dims else None for _ in "kv"]
    if not packed:
        return KVPool(*pages, *scales)
    scales = [scale.half() if dims == 3 else scale for scale in scales]
    pool = KVPool(*pages, *scales, turn=dim & -dim, k_offset=torch.zeros(8, dim))
    fed = {"dynamic": True, "k_feedback": torch.zeros(8, dim, dim)}
    return replace(pool, **fed) if dims == 3 else pool


def make_inputs(pool, starts=None):
    """Attention of two sequences over a pool."""
    tables = torch.zeros(2, 2, dtype=torch.int32)
    return AttentionInputs(pool, tables, tables[:, 0].contiguous(), starts, 0.1)


@pytest.mark.parametrize(
    ("capability", "dims", "storage", "result"),
    [
        (80, 1, torch.int8, torch.int8),
        (80, 0, torch.bfloat16, None),
        (89, 1, FP8, FP8),
        pytest.param(90, 3, torch.int8, None, marks=EVERY),
        (90, 0, torch.float16, torch.int8),
        (90, 3, torch.uint8, None),
        pytest.param(80, 1, torch.uint8, None, marks=EVERY),
    ],
)
@compiled
def test_decode_attention(capability, dims, storage, result):
    q, workspace = torch.zeros(2, 32, 128).bfloat16(), Workspace.on("cpu", 1 << 20, 64)
    more = {"out_scale": torch.ones(1), "out_dtype": result} if result else {}
    inputs = make_inputs(make_pool(storage, dims))
    for split in (KVSplit(4, 4, 3), KVSplit(2, 4))[: 2 if dims else 1]:
        with building_for(capability) as built:
            decode_attention(q, inputs, workspace, split=split, metadata_ready=dims != 3, **more)
        (binary,) = fitting(built)
        assert binary.count(WAIT) == (capability == 90)
        assert not binary.count(ANNOUNCE), "the next kernel would crowd programs that do not start"
        assert binary.count("|".join((MMA, WGMMA)).format(*[r"f16\.b?f16"] * 2))
        if split.stages == 0:
            assert binary.count(r"ld\.global\S*v4\.b32") >= 32, "pages, 16 bytes at a time"
            assert binary.count("movmatrix") == 8
            loop = binary.ptx[binary.ptx.index("mma.sync") : binary.ptx.rindex("mma.sync")]
            assert "shared" not in loop
            assert "bar.sync" not in loop


@pytest.mark.parametrize(
    ("capability", "dims", "storage", "dim"),
    [(80, 0, torch.bfloat16, 256), (90, 1, torch.int8, 256), (90, 0, torch.bfloat16, 96)],
)
@compiled
def test_attention_with_bounded_logits_and_sinks(capability, dims, storage, dim):
    """Of the largest heads, and of such as fill no tile."""
    q, workspace = torch.zeros(256, 16, dim).bfloat16(), Workspace.on("cpu", 1 << 20, 64)
    inputs = make_inputs(make_pool(storage, dims, dim), torch.tensor([0, 128, 256]))
    inputs = replace(inputs, sliding_window=100, softcap=50.0, sinks=torch.zeros(16))
    tile = prefill_rule(math.inf, 256 if dim > 128 else 128, dims, capability)
    with building_for(capability) as built:
        decode_attention(q[:2], inputs, workspace, split=KVSplit(4, 4, 3))
        prefill_attention(q, inputs, workspace, tile=tile)
        prefill_attention(q, inputs, workspace, tile=replace(tile, splits=2))
    fitting(built, 3, SHARED if capability == 90 else 101376)


@pytest.mark.parametrize(
    ("capability", "dims", "storage"),
    [(80, 1, torch.int8), (90, 1, torch.int8), (90, 3, torch.uint8)],
)
@compiled
def test_sink_tokens_are_written_and_read_without_spills(capability, dims, storage):
    pool, workspace = make_pool(storage, dims), Workspace.on("cpu", 1 << 20, 64)
    held = torch.zeros(4, 8, 2, 128).bfloat16()
    inputs = make_inputs(replace(pool, sink_k=held, sink_v=held), torch.tensor([0, 128, 256]))
    qkv, angle = torch.zeros(256, 48, 128).bfloat16(), torch.zeros(256, 128)
    q, k, v = qkv.split([32, 8, 8], dim=1)
    slots, tile = torch.zeros(256, dtype=torch.int64), prefill_rule(math.inf, 128, dims, capability)
    with building_for(capability) as built:
        for count in (2, 256):
            rows = (x[:count] for x in (q, k, v, angle, angle))
            rope_write(*rows, inputs.pool, slots[:count], slots[:count])
        for split in (KVSplit(4, 4, 3), KVSplit(2, 4)):
            decode_attention(q[:2].contiguous(), inputs, workspace, split=split)
        prefill_attention(q.contiguous(), inputs, workspace, tile=tile)
    fitting(built, 5)


@pytest.mark.parametrize("capability", CAPABILITIES)
@compiled
def test_rows_quantized_by_runs(capability):
    x, weight = torch.zeros(2, 28672).bfloat16(), torch.ones(4096)
    narrow = x[:, :4096].contiguous()
    with building_for(capability) as built:
        add_rms_norm(narrow, narrow, weight, 1e-6, dtype=FP8, group=128)
        gated_product(x, dtype=FP8, group=128)
        quantize_rows(narrow, dtype=FP8, group=128)
    for binary in fitting(built, 3, registers=64):  # rows of 14336 take 32 warps
        assert binary.count(r"div\.rn\.f32") <= 8, "scales alone are divided, not elements"


@pytest.mark.parametrize("capability", CAPABILITIES)
@compiled
def test_norms_and_products_of_other_families(capability):
    x, weight = torch.zeros(2, 2560).bfloat16(), torch.ones(2560)
    heads, pool = torch.zeros(2, 40, 96).bfloat16(), make_pool(torch.int8, 3, 96)
    angle, slots = torch.zeros(2, 96), torch.zeros(2, dtype=torch.int64)
    with building_for(capability) as built:
        for own in (weight, None):
            for dtype in (torch.int8, torch.bfloat16):
                add_rms_norm(x, x, own, 1e-6, dtype=dtype, after=weight, residual_ready=True)
        for activation in ("gelu", "gelu_tanh"):
            gated_product(x, dtype=torch.int8, activation=activation)
        norm_projections(x, weight[:1024], weight[:512].bfloat16(), 1e-6)
        q, k, v = heads.split([24, 8, 8], dim=1)
        rope_write(q, k, v, angle, angle, pool, slots, growth=torch.ones(2), metadata_ready=True)
        softcap_logits(torch.zeros(2, 5000), 30.0)
    for binary in fitting(built, 9, registers=168):
        assert bool(binary.count(WAIT)) == (capability == 90 and binary is not built[-1])


@pytest.mark.parametrize(
    ("capability", "dims", "storage", "dim"),
    [
        (80, 1, torch.int8, 128),
        (80, 0, torch.bfloat16, 256),
        (89, 3, FP8, 64),
        pytest.param(90, 3, torch.int8, 128, marks=EVERY),
        (90, 1, FP8, 256),
        (90, 0, torch.bfloat16, 64),
        (120, 0, torch.bfloat16, 128),
    ],
)
@compiled
def test_prefill_attention(capability, dims, storage, dim):
    q, workspace = torch.zeros(256, 32, dim).bfloat16(), Workspace.on("cpu", 1, 1)
    inputs = make_inputs(make_pool(storage, dims, dim), torch.tensor([0, 128, 256]))
    for share in (0, math.inf)[capability < 90 :]:
        tile = prefill_rule(share, dim, dims, capability)
        with building_for(capability) as built:
            prefill_attention(q, inputs, workspace, tile=tile)
        (binary,) = fitting(built, shared={80: 166912, 90: SHARED}.get(capability, 101376))
        assert binary.count(expected(capability, r"f16\.b?f16"))
        assert capability != 90 or not binary.count(MMA.format(""))


@pytest.mark.parametrize(
    ("dims", "storage"), [(1, FP8), (3, torch.uint8), pytest.param(3, torch.int8, marks=EVERY)]
)
@compiled
def test_prefill_attention_with_warps_of_different_tasks(dims, storage):
    q, workspace = torch.zeros(256, 32, 128).bfloat16(), Workspace.on("cpu", 1, 1)
    inputs = make_inputs(make_pool(storage, dims), torch.tensor([0, 128, 256]))
    more = {"out_scale": torch.ones(1), "out_dtype": FP8, "tile": PrefillTile(128, 64, 4, 0)}
    with building_for(90) as built:
        prefill_attention(q, inputs, workspace, **more)
    (binary,) = fitting(built)
    assert binary.count(WGMMA.format(r"f16\.b?f16")) == 24, (
        "8 for scores and 4 for sums, two halves"
    )
    assert binary.count("setmaxnreg") >= 3
    assert not binary.count("ldmatrix"), "pages go from memory to where wgmma reads them"


@compiled
def test_fp8_is_refused_where_it_is_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    check_fp8(torch.int8, torch.device("cuda"))
    with pytest.raises(ValueError, match="use an int8 cache"):
        check_fp8(FP8, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_fp8(FP8, torch.device("cuda"))


@pytest.mark.parametrize(
    ("capability", "storage"),
    [(80, torch.int8), (89, FP8), (90, torch.uint8), pytest.param(90, torch.int8, marks=EVERY)],
)
@compiled
def test_fused_rows_and_cache_write(capability, storage):
    x = torch.zeros(2, 4096).bfloat16()
    pool = make_pool(storage, 3)
    with building_for(capability) as built:
        rows = torch.int8 if storage == torch.uint8 else storage
        add_rms_norm(x, x, torch.ones(4096), 1e-6, dtype=rows)
        gated_product(x, dtype=rows)
        for tokens, more in (
            (2, {"metadata_ready": True}),
            (300, {"q_norm": x[0, :128], "k_norm": x[0, :128]}),
        ):
            q, k, v = torch.zeros(tokens, 48, 128).bfloat16().split([32, 8, 8], dim=1)
            angle, slots = torch.zeros(tokens, 128), torch.zeros(tokens, dtype=torch.int64)
            rope_write(q, k, v, angle, angle, pool, slots, **more)
    for binary in fitting(built, 4, registers=128):
        assert binary.count(WAIT) >= (capability == 90)
        assert bool(binary.count(ANNOUNCE)) == (capability == 90 and binary is not built[-1])
        assert binary.count(r"div\.rn\.f32") <= 24, "scales alone are divided, not elements"
    pieces = 4 if storage == torch.uint8 else 8
    assert binary.count(r"st\.global\S*v4") >= pieces, "columns leave in pieces of 16 bytes"
