"""The inspect command on float, quantized and foreign checkpoints."""

import io
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from calibrate.statistics import Statistics
from formats.checkpoint.native import only_here
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RequestError
from ptq.commands import inspect as command
from ptq.commands import run
from ptq.report.inspection import describe, inspect, outlier_row, weight_outliers
from tests.ptq.quantizing import settings


@pytest.fixture(scope="module")
def quantized(tiny_llama, make_quantized) -> Path:
    return make_quantized(tiny_llama)


def test_a_quantized_checkpoint(quantized):
    checkpoint = Checkpoint.open(quantized)
    found = inspect(checkpoint)
    assert (found.model_type, found.wac) == ("llama", "a8w8c8")
    sizes = {row.kind: row for row in found.sizes}
    assert sizes["int8 weights"].tensors == 2 * 7
    assert sizes["int8 weights"].nbytes == sum(
        checkpoint.tensor(f"{name}.weight").numel() for name in checkpoint.quantized_modules
    )
    assert sizes["scales of the cache"].elements == 2 * 2 * 2
    whole = sum(checkpoint.tensor(name).nbytes for name in checkpoint.names())
    assert sum(row.nbytes for row in found.sizes) == whole + 2 * 2 * 2 * 4
    assert checkpoint.scale_table is not None
    assert len(found.scales) == len(checkpoint.scale_table.entries) == 2 * (7 * 2 + 2)


def test_a_float_checkpoint_has_sizes_and_outliers_but_no_scales(tiny_llama, capsys):
    found = inspect(Checkpoint.open(tiny_llama))
    assert (found.wac, found.scales) == ("float", ())
    assert [row.kind for row in found.sizes] == ["bfloat16 weights"]
    assert len(found.outliers) == 2 * 7
    assert command.main([str(tiny_llama)]) == 0
    out = capsys.readouterr().out
    assert "Outlier channels of weights" in out
    assert "Scales" not in out


def test_the_largest_channels_are_named():
    channels = torch.ones(100)
    channels[17], channels[40] = 650.0, 30.0
    row = outlier_row("m", "input", channels, top=2)
    assert (row.channels, row.magnitudes) == ((17, 40), (650.0, 30.0))
    assert (row.absmax, row.median, row.ratio) == (650.0, 1.0, 650.0)
    assert outlier_row("m", "input", torch.zeros(4)).ratio is None


def test_weight_channels_are_equal_before_and_after_quantization(tiny_llama, quantized):
    before = {row.module: row for row in weight_outliers(Checkpoint.open(tiny_llama))}
    after = {row.module: row for row in weight_outliers(Checkpoint.open(quantized))}
    assert before.keys() == after.keys()
    for name, row in before.items():
        assert after[name].channels == row.channels
        assert after[name].absmax == pytest.approx(row.absmax, rel=1e-6)


def test_statistics_beside_the_checkpoint_are_used(quantized, tmp_path, capsys):
    shutil.copytree(quantized, tmp_path / "checkpoint")
    statistics = Statistics()
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    x[:, 77] *= 300
    for name in ("gate_proj", "up_proj"):  # which read the same: one is shown
        statistics.observe(f"model.layers.0.mlp.{name}", "input", x)
    statistics.save(tmp_path / "statistics.safetensors")
    found = inspect(Checkpoint.open(tmp_path / "checkpoint"))
    assert found.outliers[0].module == "model.layers.0.mlp.gate_proj"
    assert (found.outliers[0].role, found.outliers[0].channels[0]) == ("input", 77)
    assert "Outlier channels of activations: the 1 tensors" in "\n".join(describe(found, 5))
    (tmp_path / "statistics.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="not a statistics file"):
        command.main([str(tmp_path / "checkpoint")])


def test_a_foreign_checkpoint_shows_what_its_tensors_tell(quantized, tmp_path, capsys):
    foreign = tmp_path / "foreign"
    shutil.copytree(quantized, foreign, ignore=shutil.ignore_patterns("quant"))
    config = json.loads((foreign / "config.json").read_bytes())
    del config["ptq"]  # others do not write it
    (foreign / "config.json").write_text(json.dumps(config))
    found = inspect(Checkpoint.open(foreign))
    assert found.wac == "a8w8"
    assert len(found.scales) == 2 * 7 * 2
    assert {row["role"] for row in found.scales} == {"weight", "input"}
    own = {row["tensor"]: row for row in inspect(Checkpoint.open(quantized)).scales}
    assert all(row["scale_max"] == own[row["tensor"]]["scale_max"] for row in found.scales)
    assert command.main([str(foreign)]) == 0
    assert "Scales (28)" in capsys.readouterr().out


def test_the_command_shows_scales_cache_and_outliers(quantized, capsys):
    assert command.main([str(quantized), "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama, scheme a8w8c8, ")
    assert "Scales (32)" in out
    assert "K cache: scales from 0.03 to 0.04 in 2 layers, largest over smallest 1.3" in out
    assert "the 3 tensors whose largest channel stands out most" in out


@pytest.mark.parametrize(
    ("pattern", "scales"), [("layers.1", 16), ("*.down_proj", 4), ("model.layers.?.self_attn", 4)]
)
def test_patterns_choose_modules(quantized, pattern, scales):
    assert len(inspect(Checkpoint.open(quantized), pattern).scales) == scales


def test_a_pattern_that_matches_nothing_is_an_error(quantized):
    with pytest.raises(RequestError, match=r"'down\?' matches none of 16 modules, such as model"):
        command.main([str(quantized), "--module", "down?"])


def test_json_and_csv_hold_everything(quantized, tmp_path, capsys):
    files = tmp_path / "i.json", tmp_path / "i.csv"
    arguments = [str(quantized), "--module", "layers.0", "--json", str(files[0])]
    assert command.main([*arguments, "--csv", str(files[1])]) == 0
    data = json.loads(files[0].read_text())
    table = pd.read_csv(io.StringIO(files[1].read_text()))
    assert len(data["scales"]) == len(table) == 16
    assert list(table["tensor"]) == [row["tensor"] for row in data["scales"]]
    assert table["scale_max"].tolist() == [row["scale_max"] for row in data["scales"]]
    assert data["wac"] == "a8w8c8"


def test_a_table_of_a_float_model_is_refused(tiny_llama, tmp_path):
    with pytest.raises(RequestError, match="has no scales"):
        command.main([str(tiny_llama), "--csv", str(tmp_path / "x.csv")])
    assert list(tmp_path.iterdir()) == []


def test_no_outliers_at_all_is_refused(quantized):
    with pytest.raises(SystemExit):
        command.main([str(quantized), "--top", "0"])


@pytest.mark.usefixtures("unpictured")
def test_a_checkpoint_for_this_runtime_alone_says_so(make_model, make_quantized, tmp_path, capsys):
    """When it is written, in its card and in `inspect`, with what makes one for others."""
    base = ["a8w8", "--quiet", *settings("ignore=[]", f"model.path={make_model('llama')}")]
    for name, more in (("tied", []), ("untied", ["--set", "methods=[untie, rtn]"])):
        run.main([*base, *more, "--output", str(tmp_path / name)])
        told = capsys.readouterr().out
        folder = tmp_path / name / "checkpoint"
        card = folder / "README.md"
        assert card.exists() == ("Only this runtime opens it" in told) == (name == "tied")
        command.main([str(folder), "--json", str(tmp_path / "found.json")])
        shown = capsys.readouterr().out
        found = json.loads((tmp_path / "found.json").read_text())["only_here"]
        if name == "tied":
            for text in (told, shown, card.read_text(), found):
                assert "Only this runtime opens it: " in text
                assert "the method `untie`" in text
        else:
            assert found is None
            assert "Only this runtime" not in shown
        Checkpoint.open(folder, verify=True)


@pytest.mark.parametrize("family", ["gpt2", "llama_alibi"])
def test_families_that_no_other_software_reads_quantized(family, tmp_path):
    config = {"model_type": family}
    assert "Only this runtime" in str(only_here(config, quantized=True, shares_head=False))
    alone = only_here(config, quantized=False, shares_head=False)
    assert (alone is None) == (family == "gpt2")
    assert only_here({"model_type": "llama"}, quantized=True, shares_head=False) is None
