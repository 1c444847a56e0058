"""Which tile is chosen: the device's table, else a rule whose tiles always fit."""

import itertools
import json

import pytest
import torch

import kernels.bench.tune as tune
import kernels.triton.tuning as tuning
from kernels.bench.command import parse_tune
from kernels.bench.shapes import TUNED, TUNED_ATTENTION, TUNED_PROMPTS
from kernels.triton import common
from kernels.triton.tuning import KVSplit, PrefillTile, Tile

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget():
    """Tables are read once; tests read their own."""
    caches = (tuning.gemm_tile, tuning.kv_split, tuning.prefill_tile, tuning._table)
    for found in caches:
        found.cache_clear()
    yield
    for found in caches:
        found.cache_clear()


def test_buckets_are_powers_of_two_from_16_on():
    counts = (1, 16, 17, 64, 65, 4096)
    assert [tuning.bucket(n) for n in counts] == [16, 16, 32, 64, 128, 4096]
    assert [tuning.bucket_of("w8a8", n) for n in counts] == [tuning.bucket(n) for n in counts]
    assert [tuning.bucket_of("w4a16", n) for n in (1, 8, 9, 17)] == [8, 8, 16, 32]


@pytest.mark.parametrize(
    "family", ["w4a16", "w4a8_two_level", "w8a16", "w8a8", "fp8", "fp8_block", "w16a16"]
)
@pytest.mark.parametrize("rows", [1, 16, 64, 256, 4096])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(28672, 4096), (64, 128), (192, 512), (4096, 14336)]
)
def test_the_rule_gives_tiles_that_divide_the_outputs(family, rows, outputs, inputs):
    for processors in (1, 108, 132):
        tile = tuning.rule(family, processors, rows, outputs, inputs)
        assert outputs % tile.outputs == 0
        assert not tile.persistent
        by_warps = rows == 1 and family in ("w4a16", "w4a8_two_level", "w8a16")
        assert 1 <= tile.splits <= max(1, inputs // (512 if by_warps else 1024))
        assert tile.rows >= min(tuning.bucket_of(family, rows), 64)
        assert (tile.warps < 4) == by_warps


@pytest.mark.parametrize("family", ["w4a16", "w4a8", "w8a16", "w8a8", "fp8", "fp8_block", "w16a16"])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (192, 512), (4096, 14336)])
def test_tuning_has_candidates_that_divide_the_outputs(family, outputs, inputs):
    for rows in (1, 64):
        found = list(tune.tiles(family, rows, outputs, inputs, 132))
        assert found
        assert all(outputs % tile.outputs == 0 for tile in found)


@pytest.mark.parametrize("family", ["w4a16", "w4a8", "w8a16", "w8a8", "fp8_block", "w16a16"])
@pytest.mark.parametrize("processors", [108, 132, 188])
def test_sums_of_candidates_fit_in_a_workspace(family, processors, monkeypatch):
    monkeypatch.setattr(tune, "_whole", lambda *sizes: iter(()))  # what asks for the device
    for rows, outputs in itertools.product((16, 64, 256, 1024), (4096, 22016, 28672)):
        for tile in tune.tiles(family, rows, outputs, 4096, processors):
            tiles = outputs // tile.outputs * -(-rows // tile.rows)
            sums = tiles * tile.outputs * tile.rows * tile.splits
            assert tile.splits == 1 or sums <= tuning.PARTS


@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_what_is_measured_is_what_is_read(capability, tmp_path, monkeypatch):
    """Of the families that the device has."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(common, "capability", lambda: capability)
    asked = []

    def tiles(family, *sizes):
        asked.append((family, sizes[0]))

    monkeypatch.setattr("kernels.bench.gpu_cases.gemm", lambda *sizes: None)
    monkeypatch.setattr(tune, "tiles", tiles)
    monkeypatch.setattr(tune, "best", lambda case, candidates: (Tile(64, 32, 2, 7), 1.0))
    layers = [family for family in TUNED if family not in (*TUNED_ATTENTION, *TUNED_PROMPTS)]
    sizes = ("--shapes", "128x256", "--rows", "16", "64", "256")
    assert tune.tune_families(parse_tune(["--families", *layers, *sizes]), CPU) == 0
    for family in layers:
        runs = not family.endswith("_many") or capability == 90
        runs &= family != "fp8" or capability >= 89
        for rows in (16, 64, 256):
            chosen = family != "w16a16" or rows <= 64
            chosen &= not family.endswith("_many") or rows > 16
            assert ((family, rows) in asked) == (runs and chosen)
            found = tuning.measured_tile(family, CPU, rows, 128, 256)
            assert found == (Tile(64, 32, 2, 7) if runs and chosen else None)


def test_few_rows_of_4_bit_weights_have_four_programs_an_sm():
    assert tuning.rule("w4a16", 132, 8, 28672, 4096) == Tile(64, 8, 1, 5, 2)
    assert tuning.rule("w4a16", 132, 1, 6144, 4096) == Tile(64, 8, 5, 4, 2)
    assert tuning.rule("w4a8", 132, 1, 4096, 14336) == Tile(64, 8, 8, 4, 2)
    assert tuning.rule("w4a16", 132, 1, 1024, 512) == Tile(64, 8, 1, 5, 2)
    assert tuning.rule("w4a16_mxfp4", 132, 8, 5760, 2880, 4) == Tile(64, 8, 2, 4, 2)
    assert tuning.rule("w4a16", 132, 9, 4096, 4096).warps == 4


def test_16_bit_weights_are_split_where_tiles_are_few():
    assert tuning.rule("w16a16", 132, 1, 28672, 4096) == Tile(64, 16, 1, 5)
    assert tuning.rule("w16a16", 132, 16, 4096, 14336) == Tile(64, 16, 1, 5, inputs=256)
    assert tuning.rule("w16a16", 132, 1, 1024, 4096) == Tile(64, 16, 4, 5, inputs=256)
    assert tuning.rule("w16a16", 132, 1, 1024, 4224).inputs == 256
    assert tuning.rule("w16a16", 132, 33, 28672, 4096) == Tile(128, 64, 1, 3)


def test_a_table_goes_before_the_rule(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    table = {
        "w8a8": {"128x256": {"16": {"outputs": 64, "rows": 16, "splits": 2, "stages": 3}}},
        "attention": {"16x64": {"warps": 2, "splits": 7}},
        "prefill": {"128x256": {"rows": 64, "tokens": 32, "warps": 4, "stages": 9}},
    }
    (tmp_path / "cpu.json").write_text(json.dumps(table))
    assert tuning.gemm_tile("w8a8", CPU, 3, 128, 256) == Tile(64, 16, 2, 3)
    assert tuning.gemm_tile("w8a8", CPU, 17, 128, 256) == tuning.rule("w8a8", 1, 17, 128, 256)
    assert tuning.kv_split(CPU, 2, 8, 64) == KVSplit(2, 7)
    assert tuning.kv_split(CPU, 2, 8, 65).splits != 7
    assert tuning.kv_split(CPU, 2, 8, 64, 3).splits != 7
    assert tuning.kv_split(CPU, 2, 8, 64, 1, 256) == KVSplit(4, 1, 3), "no table is of such heads"
    assert tuning.prefill_tile(CPU, 130, 128, 1) == PrefillTile(64, 32, 4, 9)
    assert tuning.prefill_tile(CPU, 130, 128, 0).stages != 9
    few = [tuning.prefill_tile(CPU, rows, 128, 0, 64).splits for rows in (1, 16, 32, 64, 100)]
    assert few == [4, 4, 4, 2, 1], "runs of 16 pages or more, two programs an SM"


@pytest.mark.parametrize("dim", [128, 256, 512])
def test_steps_of_any_size_run_few_kernels(monkeypatch, dim):
    """Each number of splits is compiled: a stall of half a second."""
    monkeypatch.setattr(tuning, "multiprocessors", lambda _: 132)
    cuts = {n: tuning.kv_split.__wrapped__(CPU, n, 4, 72, 0, dim) for n in range(1, 65)}
    assert all(cuts[n] == cuts[tuning.halfway(n)] for n in cuts)
    assert len({cut.splits for cut in cuts.values()}) <= 8
    tiles = (tuning.prefill_tile.__wrapped__(CPU, 4 * n, dim, 0, 256) for n in range(1, 4096))
    prompts = {tile.splits for tile in tiles}
    assert prompts <= {1, *tuning.SPLITS}


def test_runs_of_decode_attention_are_equal_and_fill_the_device_once():
    """What an H200 took least time with, or within 3% of it."""
    cuts = {
        (4, 64): (4, 16),
        (8, 64): (4, 16),
        (16, 64): (4, 8),
        (32, 64): (2, 8),
        (64, 64): (2, 8),
    }
    cuts |= {(128, 64): (2, 4), (256, 64): (4, 1), (512, 64): (2, 1), (8, 512): (4, 32)}
    cuts |= {(32, 512): (4, 8), (8, 16): (2, 8), (8, 4): (4, 1)}
    for (items, pages), cut in cuts.items():
        assert tuning.kv_rule(132, items, pages) == KVSplit(*cut)
    for items, pages in itertools.product((1, 7, 64, 90, 3000), (1, 5, 64, 1000)):
        cut = tuning.kv_rule(108, items, pages)
        assert cut.splits.bit_count() == 1
        assert cut.splits == 1 or cut.splits * cut.warps <= pages
        assert cut.splits == 1 or items * cut.splits * cut.warps <= 8 * 108


def test_a_device_without_an_entry_takes_that_of_its_chip(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(tuning, "LIKE", {"cpu": "twin"})
    tables = {"cpu": {"1x1": {"16": {"outputs": 64, "rows": 16}}}, "twin": {}}
    tables["twin"] = {"1x1": {"16": {"outputs": 128, "rows": 16}}, "2x2": tables["cpu"]["1x1"]}
    for name, own in tables.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"w8a8": own}))
    assert tuning.gemm_tile("w8a8", CPU, 1, 1, 1) == Tile(64, 16)
    assert tuning.gemm_tile("w8a8", CPU, 1, 2, 2) == Tile(64, 16)
    assert tuning.gemm_tile("w8a8", CPU, 1, 128, 3) == tuning.rule("w8a8", 1, 1, 128, 3)


def test_devices_that_are_alike_have_a_table():
    assert all((tuning.FOLDER / f"{name}.json").exists() for name in tuning.LIKE.values())


def test_tables_in_the_package_can_be_read():
    tables = list(tuning.FOLDER.glob("*.json"))
    assert tables
    for path in tables:
        for family, shapes in json.loads(path.read_text()).items():
            for entry in shapes.values():
                if family.startswith(("attention", "prefill")):
                    (KVSplit if family.startswith("attention") else PrefillTile)(**entry)
                    continue
                assert all(Tile(**tile).outputs % 64 == 0 for tile in entry.values())
