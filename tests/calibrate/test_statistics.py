"""The artifact gives back what was saved, bit for bit, and refuses what was damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate import statistics as artifact
from calibrate.observers import choose_absmax
from calibrate.spec import ObserverSpec
from calibrate.statistics import Statistics
from calibrate.tensor_statistics import TensorStatistics
from formats.errors import CheckpointError


def seen(seed: int = 0) -> Statistics:
    generator = torch.Generator().manual_seed(seed)
    statistics = Statistics()
    statistics.observe("b.up_proj", "input", torch.randn(50, 24, generator=generator))
    statistics.observe("a.self_attn", "k_cache", torch.randn(9, 2, 8, generator=generator))
    statistics.observe("a.self_attn", "v_cache", torch.zeros(9, 2, 8))
    keys = statistics["a.self_attn", "k_cache"]
    keys.channel_sum = torch.ones(2, 8, dtype=torch.float64) * (1 + seed)
    keys.query_moments = torch.eye(8, dtype=torch.float64).repeat(2, 1, 1)
    return statistics


@pytest.fixture
def saved(tmp_path) -> Path:
    seen().save(tmp_path / "s.safetensors")
    return tmp_path / "s.safetensors"


def test_what_is_saved_comes_back(saved):
    loaded = Statistics.load(saved)
    assert loaded == seen()
    assert loaded != seen(1)
    assert list(loaded) == [
        ("a.self_attn", "k_cache"),
        ("a.self_attn", "v_cache"),
        ("b.up_proj", "input"),
    ]
    for method in ("absmax", "percentile", "mse", "entropy"):  # solved again without a forward pass
        spec = ObserverSpec(method=method)
        for key, stats in seen().items():
            assert choose_absmax(loaded[key], spec) == choose_absmax(stats, spec)


def test_only_occupied_bins_are_stored(saved):
    assert saved.stat().st_size < 40_000  # dense histograms would take over a megabyte


def test_equal_statistics_have_equal_files(saved, tmp_path):
    seen().save(tmp_path / "again.safetensors")
    assert saved.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_modules_that_share_their_statistics_can_be_saved(tmp_path):
    statistics = seen()
    statistics["b.gate_proj", "input"] = statistics["b.up_proj", "input"]
    statistics.save(tmp_path / "s.safetensors")
    assert Statistics.load(tmp_path / "s.safetensors") == statistics


def test_passes_over_other_data_and_other_modules_merge():
    left, right = seen(), seen(1)
    right.observe("c.down_proj", "input", torch.ones(3, 4))
    left.merge(right)
    assert left["b.up_proj", "input"].tokens == 100
    assert left["c.down_proj", "input"] == right["c.down_proj", "input"]
    both = seen()
    both["b.up_proj", "input"].merge(seen(1)["b.up_proj", "input"])
    assert left["b.up_proj", "input"] == both["b.up_proj", "input"]


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Statistics.load(path)
    assert all(word in str(caught.value) for word in (str(path), "Run the recipe", *words))


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    refused(saved)


def test_trailing_bytes(saved):
    saved.write_bytes(saved.read_bytes() + b"x")
    refused(saved)


def test_any_flipped_bit(saved):
    whole = bytearray(saved.read_bytes())
    for position in range(0, len(whole), 211):
        flipped = whole.copy()
        flipped[position] ^= 1 << position % 8
        saved.write_bytes(flipped)
        try:
            assert Statistics.load(saved) == seen()  # white space of the header
        except CheckpointError:
            continue


def test_absent_and_foreign_files(saved, tmp_path):
    refused(tmp_path / "absent.safetensors")
    saved.write_bytes(b"nothing")
    refused(saved)
    save_file({"model.norm.weight": torch.ones(3)}, saved)
    refused(saved, "ptq_statistics")


def edited(path: Path, **arrays: torch.Tensor | None) -> None:
    """Change arrays of a file's first entry and write it with a SHA-256 that is right."""
    held = load_file(path)
    for name, array in arrays.items():
        held.pop(f"b.up_proj/input/{name}")
        if array is not None:
            held[f"b.up_proj/input/{name}"] = array
    save_file(held, path, metadata=artifact._header(held))


@pytest.mark.parametrize(
    "arrays",
    [
        {"tokens": None},
        {"tokens": torch.tensor([51])},
        {"tokens": torch.tensor([50.0])},
        {"tokens": torch.tensor([50, 50])},
        {"counts": torch.tensor([1200])},
        {"counts": torch.tensor([-1]), "bins": torch.tensor([3], dtype=torch.int32)},
        {"counts": torch.tensor([1200]), "bins": torch.tensor([1 << 15], dtype=torch.int32)},
        {"counts": torch.tensor([600, 600]), "bins": torch.tensor([5, 5], dtype=torch.int32)},
        {"channel_absmax": torch.full((24,), float("nan"))},
        {"channel_absmax": torch.full((24,), -1.0)},
        {"channel_absmax": torch.ones(2, 3, 4)},
    ],
)
def test_numbers_that_no_calibration_leaves_behind(saved, arrays):
    edited(saved, **arrays)
    refused(saved)


def test_sums_merge_and_follow_their_channels():
    keys, other = (seen(i)["a.self_attn", "k_cache"] for i in range(2))
    keys.merge(other)
    assert torch.equal(keys.channel_sum, torch.full((2, 8), 3.0).double())
    assert torch.equal(keys.query_moments, 2 * other.query_moments)
    factor = torch.arange(1.0, 17).view(2, 8).double()
    divided = keys.divided(factor)
    torch.testing.assert_close(divided.channel_sum, 3 / factor)
    assert torch.equal(divided.query_moments, torch.diag_embed(2 * factor**2))


def test_moments_of_another_shape_are_refused(saved):
    held = load_file(saved)
    held["a.self_attn/k_cache/query_moments"] = torch.eye(8).double()
    save_file(held, saved, metadata=artifact._header(held))
    refused(saved)


def test_an_untouched_edit_is_accepted(saved):
    edited(saved)
    assert Statistics.load(saved) == seen()


def test_names_without_a_role(saved):
    arrays = TensorStatistics((4,)).state()
    save_file(arrays, saved, metadata=artifact._header(arrays))
    refused(saved)
