"""Weights of 4 and 8 bits times many rows on Hopper, without a GPU: what is compiled, who does what."""

from collections import Counter
from unittest import mock

import pytest
import torch

from kernels.triton.common import Workspace, library_scales
from kernels.triton.linear import w4a8, w8a8, weight_only
from kernels.triton.linear import weight as weight_module
from kernels.triton.linear.hopper import launch
from kernels.triton.linear.hopper import w4 as runs_gluon
from kernels.triton.linear.hopper import w8 as w8_gluon
from kernels.triton.linear.hopper.launch import division, many_rows_rule, rule
from kernels.triton.linear.w4a8 import pack_w4a8
from kernels.triton.linear.w8a8 import pack_w8a8
from kernels.triton.linear.weight_only import pack_w4a16
from kernels.triton.tuning import Tile
from tests.kernels.triton_lab import (
    SHARED,
    assembler_says,
    building_for,
    compiled,
    fitting,
    interpreted,
)

FP8 = torch.float8_e4m3fn


def ordinary(outputs: int, groups: int) -> torch.Tensor:
    """Scales that do not have two levels."""
    return 1 + torch.arange(outputs * groups).reshape(outputs, groups) / 8192


@pytest.mark.parametrize(
    "family",
    ["w4a16", *(pytest.param(f, marks=pytest.mark.every_triton) for f in ("w4a16_cut", "w4a8"))],
)
@compiled
def test_weights_go_through_registers_and_products_do_not_wait(family):
    workspace = Workspace.on("cpu", 1 << 16, 64)
    q, scale = torch.zeros(512, 1024, dtype=torch.int8), ordinary(512, 8)
    bias, x = torch.zeros(512), torch.zeros(200, 1024, dtype=torch.int8)
    with building_for(90) as built:
        if family == "w4a16":
            large, tall = Tile(256, 128, 1, 4, 8, True), Tile(128, 256, 4, 6, 8, True)
            pack_w4a16(q, scale).run(x.bfloat16(), None, workspace, torch.bfloat16, tile=large)
            weight = pack_w4a16(q, scale.half(), bias)
            weight.run(x.half(), None, workspace, torch.float16, tile=tall)
        elif family == "w4a16_cut":
            weight = pack_w4a16(q, scale.half(), bias)
            small = Tile(128, 64, 4, 6, 8, True)
            weight.run(x.half(), None, workspace, torch.float16, tile=small)
        else:
            tile = Tile(256, 128, 4, 5, 8, True)
            weight = pack_w4a8(q, scale, bias)
            weight.run(x, torch.ones(1), workspace, tile=tile)
    kinds = {"w4a16": [r"bf16\.bf16", r"f16\.f16"], "w4a16_cut": [r"f16\.f16"]}
    kinds = kinds.get(family, [r"s8\.s8"])
    for kind, binary in zip(kinds, built, strict=True):
        assert not binary.spills(predicates=8 if "n256k16" in binary.ptx else 0)
        assert binary.shared <= SHARED
        assert binary.count(rf"wgmma\.mma_async\S*{kind} +\{{[^}}]*\}}, *\{{"), "left in registers"
        assert not binary.count(r"mma\.sync")
        loads = 3 if family == "w4a8" else 4
        assert binary.count(r"cp\.async\.bulk\.tensor\S*global\.mbarrier") == loads, "by one warp"
        assert binary.count(r"cp\.async\.bulk\.tensor\S*shared::cta") >= 2, "stored by TMA"
        assert "serialized" not in assembler_says(binary.ptx)


@pytest.mark.parametrize(
    ("tile", "groups", "result"),
    [
        pytest.param((256, 128, 4, 5), 8, torch.bfloat16, marks=pytest.mark.every_triton),
        ((128, 256, 1, 4), 32, torch.bfloat16),
        ((128, 256, 1, 4), 32, torch.int32),
        ((128, 64, 1, 6), 1, torch.bfloat16),
        ((128, 64, 1, 6), 1, torch.int32),
    ],
)
@compiled
def test_sums_of_two_levels_stay_in_the_tensor_cores(tile, groups, result):
    workspace = Workspace.on("cpu", 1 << 16, 64)
    q, x = torch.zeros(512, 1024, dtype=torch.int8), torch.zeros(200, 1024, dtype=torch.int8)
    weight = pack_w4a8(q, torch.arange(groups).expand(512, groups) % 16 + 1.0, torch.zeros(512))
    with building_for(90) as built:
        weight.run(x, torch.ones(1), workspace, result, tile=Tile(*tile, 8, True))
    (binary,) = built
    assert not binary.spills(predicates=8), "no part of a sum; those are kept from tile to tile"
    assert binary.shared <= SHARED
    assert binary.count(r"wgmma\.mma_async\S*s8\.s8 +\{[^}]*\}, *\{"), "left in registers"
    assert binary.count("prmt") <= 128, "of multipliers alone"
    assert not binary.count(r"fma\.rn"), "rounded twice, as the twin is"
    assert "serialized" not in assembler_says(binary.ptx)


class Program:
    """The little of the language that the division of work is made of, of one program."""

    def __init__(self, number: int, programs: int) -> None:
        self.number, self.programs = number, programs

    def program_id(self, axis):
        return self.number

    def num_programs(self, axis):
        return self.programs

    maximum, minimum = staticmethod(max), staticmethod(min)
    where = staticmethod(lambda condition, a, b: a if condition else b)


@pytest.mark.parametrize(
    ("tiles", "groups", "processors", "splits"),
    [(224, 32, 132, 4), (16, 112, 132, 8), (3, 2, 132, 4), (324, 3, 132, 4), (5, 7, 4, 1)],
)
@compiled
def test_every_group_of_every_tile_is_summed_once(tiles, groups, processors, splits):
    programs, cut, share = division(tiles, groups, processors, splits)
    assert programs <= processors
    sizes = (1, 64, tiles, groups, cut, share)
    seen, contributors = Counter(), Counter()
    pieces, piece = runs_gluon.pieces.fn, runs_gluon.piece.fn
    for number in range(programs):
        language = Program(number, programs)
        with mock.patch.multiple(runs_gluon, gl=language, pieces=pieces):
            own = [piece(item, sizes) for item in range(sum(pieces(sizes)))]
        for tile, low, high in own:
            assert 0 <= low < high <= groups
            seen.update((tile, g) for g in range(low, high))
            contributors[tile] += high - low < groups
    assert seen == Counter({(t, g): 1 for t in range(tiles) for g in range(groups)})
    for tile, count in contributors.items():
        if count:  # as many as `sum_parts` waits for
            begin = tile * groups
            assert count == (begin + groups - 1) // share - begin // share + 1
            assert begin < cut


@compiled
def test_a_workspace_holds_what_is_left_of_the_longest_prompts():
    """Tiles that are not cut, however many, take no place."""
    rows, outputs = 1 << 15, 128 * 129
    tile = launch.rule("w4a8", 132, rows, outputs)
    assert tile.splits > 1
    weight = pack_w4a8(torch.zeros(outputs, 128, dtype=torch.int8), ordinary(outputs, 1))
    x, one = torch.zeros(rows, 128, dtype=torch.int8), torch.ones(1)
    with (
        mock.patch.object(launch, "multiprocessors", return_value=132),
        building_for(90) as built,
    ):
        weight.run(x, one, Workspace.on("cpu"), tile=tile)
    assert len(built) == 1


@pytest.mark.parametrize("family", ["w4a16", "w4a8", "w4a8_two_level"])
@pytest.mark.parametrize("rows", [1, 33, 64, 65, 128, 4096])
@pytest.mark.parametrize("outputs", [64, 128, 4096, 6144, 28672])
@compiled
def test_the_rule_of_4_bits_gives_tiles_that_fit(family, rows, outputs):
    tile = rule(family, 132, rows, outputs)
    if outputs == 64 or rows == 1:
        assert tile is None
    elif tile is not None:
        assert tile.persistent
        assert outputs % tile.outputs == 0
        elements = 2 if family == "w4a16" else 1
        halves = tile.stages if elements == 2 and tile.rows > 128 else 2 * tile.stages
        stages = halves * 64 * tile.rows * elements + -(-halves // 2) * tile.outputs * (64 + 4)
        results = 2 * 64 * 2 * (32 if tile.rows > 128 and elements == 2 else 64)
        assert stages + 16 * tile.stages + results + 512 <= SHARED


@interpreted
def test_other_devices_and_weights_get_the_other_kernels():
    workspace = Workspace.on("cpu", 1 << 16, 64)
    q = torch.randint(-8, 8, (64, 256), dtype=torch.int8)
    x = torch.randint(-127, 128, (3, 256), dtype=torch.int8)
    scale, one = torch.rand(64, 2), torch.ones(1)
    weight = weight_only.pack_w4a16(q, scale)
    assert weight.tile(x.half(), torch.float16, None) == weight.few_rows_tile(x)
    for scales in (scale, scale[:, :1]):
        weight8 = w4a8.pack_w4a8(q, scales)
        assert weight8.tile(x, torch.float16, None) == weight8.few_rows_tile(x)
    many = Tile(128, 64, 1, 6, 8, True)
    with pytest.raises(ValueError, match="64 outputs; needed are 128 or 256"):
        weight.run(x.half(), None, workspace, torch.float16, tile=many)
    fine = w4a8.pack_w4a8(q, torch.rand(64, 8))
    with pytest.raises(ValueError, match="groups of 32 inputs"):
        fine.run(x, one, workspace, tile=many)
    with pytest.raises(ValueError, match="results in torch.float32"):
        weight.run(x.half(), None, workspace, torch.float32, tile=many)


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
def test_the_rule_of_8_bits_gives_tiles_that_fit(rows, outputs):
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
