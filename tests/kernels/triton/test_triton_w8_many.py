"""W8A8 times many rows on Hopper, without a GPU: what is compiled, which tiles, who gets which."""

from unittest import mock

import pytest
import torch

from kernels.triton.common import Workspace, library_scales
from kernels.triton.linear import w8a8
from kernels.triton.linear import weight as weight_module
from kernels.triton.linear.hopper import w8 as w8_gluon
from kernels.triton.linear.hopper.w8_launch import many_rows_rule
from kernels.triton.linear.w8a8 import pack_w8a8
from kernels.triton.tuning import Tile
from tests.kernels.triton.test_triton_w4_many import Program
from tests.kernels.triton_lab import (
    SHARED,
    assembler_says,
    building_for,
    compiled,
    fitting,
    interpreted,
)

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("storage", "result", "tile", "inputs"),
    [
        pytest.param(
            *(torch.int8, torch.bfloat16, (128, 256, 1, 4), 1024), marks=pytest.mark.every_triton
        ),
        (torch.int8, torch.float32, (256, 128, 1, 4), 1024),
        (torch.int8, torch.int32, (256, 128, 1, 4), 1024),
        pytest.param(
            *(FP8, torch.bfloat16, (128, 256, 1, 4), 1024), marks=pytest.mark.every_triton
        ),
        (FP8, torch.float16, (128, 128, 1, 6), 14336),
    ],
)
@compiled
def test_both_operands_stay_in_shared_memory_and_products_do_not_wait(
    storage, result, tile, inputs
):
    workspace = Workspace.on("cpu", 1 << 20, 64)
    q, x = (torch.zeros(n, inputs, dtype=torch.int8).to(storage) for n in (512, 200))
    weight = pack_w8a8(q, torch.ones(512), torch.zeros(512))
    with building_for(90) as built:
        weight.run(x, torch.ones(200, 1), workspace, result, tile=Tile(*tile, 8, True))
    (binary,) = fitting(built)
    kind = r"s32\.s8\.s8" if storage == torch.int8 else r"f32\.e4m3\.e4m3"
    products = 4 * 2 * (2 if storage == torch.int8 else 1)
    assert binary.count(rf"wgmma\.mma_async\S*{kind} +\{{[^}}]*\}}, *%rd") == products
    assert not binary.count(r"mma\.sync")
    assert binary.count(r"wgmma\.wait_group\S* [1-9]") == 2, "of each, some go on"
    assert binary.count(r"cp\.async\.bulk\.tensor\S*global\.mbarrier") == 2, "loaded by one warp"
    stores = tile[0] * tile[1] // 64**2  # at least
    assert binary.count(r"cp\.async\.bulk\.tensor\S*shared::cta") >= stores
    assert not binary.count(r"fma\.rn"), "rounded twice, as the twin is"
    assert "serialized" not in assembler_says(binary.ptx)


@pytest.mark.parametrize("rows", [1, 64, 65, 128, 200, 512, 1024, 4096])
@pytest.mark.parametrize("outputs", [64, 96, 192, 128, 4096, 6144, 28672])
@compiled
def test_the_rule_gives_tiles_that_fit(rows, outputs):
    for long in (False, True):
        tile = many_rows_rule(132, rows, outputs, long)
        if rows <= 64 or outputs == 96:
            assert tile is None
        else:
            assert tile.persistent
            assert outputs % tile.outputs in (0, tile.outputs - 64)
            assert tile.stages * (128 * (tile.rows + tile.outputs) + 16) + 4 * 8192 <= SHARED
            assert not long or tile.rows * tile.outputs <= 128 * 128


@pytest.mark.parametrize(("row_tiles", "columns"), [(1, 5), (16, 3), (37, 4)])
@compiled
def test_programs_take_every_tile_once_band_by_band(row_tiles, columns):
    tiles, programs, found = row_tiles * columns, 4, {}
    sizes = (row_tiles, columns * 128, tiles, 8)
    for number in range(programs):
        with mock.patch.object(w8_gluon, "gl", Program(number, programs)):
            for item in range(w8_gluon.count.fn(sizes)):
                found[number + item * programs] = w8_gluon.place_of.fn(item, sizes, 16, 256, 128)
    assert sorted(found) == list(range(tiles))
    wanted = {(row * 256, column * 128) for row in range(row_tiles) for column in range(columns)}
    assert set(found.values()) == wanted
    height = min(row_tiles, 16)
    first = {found[tile][0] for tile in range(height * columns)}
    assert first == {row * 256 for row in range(height)}


@pytest.mark.parametrize(
    ("capability", "cuda", "all_types"),
    [
        ((9, 0), "13.0", True),
        ((9, 0), "12.9", True),
        ((9, 0), "12.8", False),
        ((8, 9), "13.0", False),
        ((12, 0), "13.0", False),
    ],
)
@compiled
def test_fp8_goes_to_the_library_where_it_gives_the_type(capability, cuda, all_types):
    """Elsewhere torch refuses fp32, and writes bf16 in the place of fp16; it has no blocks."""
    many, device = capability == (9, 0), torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        patch.setattr(torch.version, "cuda", cuda)
        patch.setattr(w8a8, "measured_tile", lambda *args: None)
        patch.setattr(w8a8, "multiprocessors", lambda device: 132)
        patch.setattr(w8a8, "takes_wide_steps", lambda device: False)
        w8a8.tile_of.cache_clear()
        assert library_scales(device) == all_types
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            given = all_types or dtype == torch.bfloat16
            for rows in (16, 100, 4096):
                tile = w8a8.tile_of("fp8", device, rows, 4096, 4096, dtype)
                taken = given and rows > (w8a8.LIBRARY_ROWS if many else 64)
                assert (tile is None) == taken
                assert taken or tile.persistent == (many and rows > 64)
    w8a8.tile_of.cache_clear()


@interpreted
def test_other_devices_get_the_kernel_for_few_rows_and_what_does_not_fit_is_refused():
    workspace = Workspace.on("cpu", 1 << 20, 64)
    q, x = (torch.randint(-127, 128, (n, 256), dtype=torch.int8) for n in (320, 70))
    weight, one = w8a8.pack_w8a8(q, torch.ones(320)), torch.ones(1)
    assert not w8a8.tile_of("w8a8", x.device, 4096, 320, 256).persistent
    got = weight.run(x, one, workspace, torch.float32)
    assert torch.equal(got, x.float() @ q.float().T)
    with pytest.raises(ValueError, match="320 outputs; needed are 128 or 256"):
        weight.run(x, one, workspace, tile=Tile(256, 128, 1, 4, 8, True))
    other = w8a8.pack_w8a8(q[:128], torch.ones(128))
    ampere = mock.patch.object(weight_module, "capability", return_value=80)
    with ampere, pytest.raises(ValueError, match="for sm_90.* this is sm_80"):
        other.run(x, one, workspace, tile=Tile(128, 128, 1, 4, 8, True))
