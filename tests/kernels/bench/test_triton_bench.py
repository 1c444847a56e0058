"""The table of GPU kernels without a GPU: peers compute what ours do, rows and files are right."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernels.bench.gpu as bench
import kernels.bench.torch_peers as peers
import kernels.bench.tune as tune
from kernels.bench.gpu import HEADER, Bench, Limits, Row
from kernels.bench.peer_times import TOLERANCE, Peers
from kernels.bench.shapes import FAMILIES, TABLE, Attention, Gemm, Traffic
from kernels.bench.torch_peers import UnavailableError
from kernels.devices import run_on_gpu

CPU = torch.device("cpu")
LIMITS = Limits("Chip", bandwidth=1e6, copied=9e5, rate=5e8)


@pytest.fixture(autouse=True)
def few_copies(monkeypatch):
    monkeypatch.setattr("kernels.bench.timing.ROTATED", 3e6)


def layer(family: str, rows: int = 32, group: int = 128, **rest) -> Gemm:
    return Gemm(family, rows, 256, 384, group, **rest)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (peers.bf16_linear, layer("w4a16", dtype=torch.float16)),
        (peers.tinygemm, layer("w4a16")),
        (peers.tinygemm, layer("w4a16_g64", 3, 64)),
        (peers.int_mm, layer("w8a8")),
        (peers.scaled_mm, layer("fp8", 3)),
        (peers.OF_ATTENTION[0].build, Attention(2, 64)),
        (peers.OF_ATTENTION[0].build, Attention(2, 96, 32)),
        (peers.OF_ATTENTION[0].build, Attention(1, 48, 48)),
        (peers.copy, Traffic(1001)),
    ],
)
def test_a_peer_computes_what_it_stands_for(build, shape):
    calls = build(shape, CPU)
    assert calls.copies > 1
    right = calls.call(0)
    assert calls.error(right) < TOLERANCE
    assert calls.error(right.roll(1, -1)) > TOLERANCE
    assert calls.call(calls.copies - 1).shape == right.shape


@pytest.mark.parametrize(
    ("build", "shape", "reason"),
    [
        (peers.tinygemm, layer("w4a16", 257), "few rows"),
        (peers.tinygemm, layer("w4a16", dtype=torch.float16), "bf16"),
        (peers.int_mm, layer("w8a8", 16), "more than 16 rows"),
        (peers.scaled_mm_blocks, Gemm("fp8_block", 8, 200, 384, 384), "whole blocks"),
        (peers.OF_ATTENTION[0].build, Attention(17, 64, 1, even=False), "equal numbers"),
    ],
)
def test_what_torch_lacks_has_a_reason(build, shape, reason):
    with pytest.raises(UnavailableError, match=reason):
        build(shape, CPU)


def test_every_family_of_layers_has_peers():
    for family in FAMILIES[: FAMILIES.index("attention")]:
        found = [peer.name for peer in peers.peers_for(layer(family))]
        assert found[-1] == "F.linear"
        assert len(found) == (1 if family.startswith(("w8a16", "w16a16")) else 2), found
    assert peers.peers_for(layer("fp8_block"))[0].name == "scaled_mm 128"
    assert peers.peers_for(None) == ()


def test_a_peer_is_measured_once_and_reasons_are_counted():
    asked = []

    def time(call, copies):
        asked.append(copies)
        return 7.0

    found = Peers(CPU, time)
    assert found.of(layer("w8a8", 3)) == {"F.linear": 7.0}
    assert found.of(layer("fp8", 3)) == {"_scaled_mm": 7.0, "F.linear": 7.0}
    assert found.of(layer("w4a16", 3)) == found.of(layer("w4a16_g64", 3, 64))
    assert len(asked) == 4  # one F.linear, one _scaled_mm, tinygemm by its groups
    found.of(layer("w4a8", 3))
    assert found.reasons == {("_int_mm", "it takes more than 16 rows"): 2}


def test_a_peer_that_is_wrong_or_refused_is_not_timed(monkeypatch):
    def never(call, copies):
        raise AssertionError("timed")

    monkeypatch.setattr("kernels.bench.peer_times.TOLERANCE", 1e-9)
    found = Peers(CPU, never)
    assert found.of(layer("w8a8")) == {}
    assert all("its result is off by" in reason for _, reason in found.reasons)
    cudnn = Peers(CPU, lambda call, copies: 1.0)
    monkeypatch.setattr("kernels.bench.peer_times.TOLERANCE", 1e-2)
    assert list(cudnn.of(Attention(2, 64))) == ["flash sdpa"]
    ((name, reason),) = cudnn.reasons
    assert name == "cudnn sdpa"
    assert reason.startswith("torch refuses: No viable backend")


def test_the_floor_is_the_larger_of_bytes_and_products():
    assert LIMITS.floor(2e6, 5e8) == 2.0
    assert LIMITS.floor(2e6, 5e9) == 10.0


def a_problem(shape, us: float = 10.0, wrong: str = "") -> Any:
    def check() -> float:
        if wrong:
            raise ValueError(wrong)
        return 1e-3

    return SimpleNamespace(
        name="a problem", nbytes=5e6, operations=1.0, shape=shape, check=check, time=lambda: us
    )


def test_rows_are_measured_and_wrong_ones_told(monkeypatch):
    measured = Peers(CPU, lambda call, copies: 20.0)
    run = Bench(LIMITS, measured)
    monkeypatch.setattr(run, "added", lambda shape: 0.5)
    found = list(
        run.rows(
            [
                ("w4a16", a_problem(layer("w4a16"))),
                ("w8a8", a_problem(layer("w8a8"), wrong="error nan")),
                ("w8a8", a_problem(layer("w8a8", 3))),
                ("sampling", a_problem(None)),
            ]
        )
    )
    assert [row.family for row in found] == ["w4a16", "w8a8", "sampling"]
    assert run.wrong == ["error nan"]
    assert found[0].cells()[1:] == [
        "10.00", "5.00", "50%", "1.0e-03", "-", "20.00", "2.00", "tinygemm",
    ]  # fmt: skip
    assert found[1].cells()[5:] == ["0.50", "20.00", "2.00", "F.linear"]
    assert found[2].cells()[5:] == ["-"] * 4


def test_the_best_peer_is_the_fastest():
    row = Row("w8a8", "x", 10.0, 5.0, 0.0, peers={"slow": 30.0, "fast": 15.0, "mid": 20.0})
    assert row.cells()[-3:] == ["15.00", "1.50", "fast"]


def test_files_hold_every_row():
    measured = Peers(CPU, lambda call, copies: 20.0)
    row = Row("w8a8", "x", 10.0, 5.0, 1e-3, 0.5, measured.of(layer("w8a8", 3)))
    text = bench.markdown(LIMITS, [row, row], bench.reasons_of(measured))
    lines = text.splitlines()
    assert lines[0].startswith("Chip, torch")
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4
    assert {line.count("|") for line in table} == {len(HEADER) + 1}
    assert lines[-1] == "- _int_mm: it takes more than 16 rows (1 rows)"
    data = json.loads(bench.to_json(LIMITS, [row], measured))
    assert data["rows"][0]["peers"] == {"F.linear": 20.0}
    assert data["rows"][0]["added"] == 0.5
    assert data["missing"] == [
        {"peer": "_int_mm", "reason": "it takes more than 16 rows", "rows": 1}
    ]
    assert data["limits"]["device"] == "Chip"


def test_lines_are_aligned():
    row = Row("w8a8", "a name", 10.0, 5.0, 1e-3, 0.5, {"copy": 4.0})
    assert bench.line(row.cells()).index("copy") == bench.line(HEADER).rindex("peer")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["w4"], "found family 'w4'; allowed are w4a16"),
        (["--table", "sampling"], "found family 'sampling'; allowed are w4a16, w4a8"),
        (["--shapes", "4096"], "write outputs x inputs"),
        (["--shapes", "4096x100"], "multiples of 64 outputs and 128 inputs"),
        (["--shapes", "0x128"], "multiples of 64 outputs and 128 inputs"),
        (["--rows", "0"], "a whole number from 1 on"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.parse(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--shapes", "4096"], ["--rows", "0"], ["--families", "w4"]])
def test_tuning_refuses_them_too(arguments):
    with pytest.raises(SystemExit) as caught:
        tune.main(arguments)
    assert caught.value.code == 2


def test_arguments_are_resolved():
    assert bench.parse([]).families == FAMILIES
    found = bench.parse(["--table", "--shapes", "64x128", "--rows", "2"])
    assert found.families == tuple(TABLE)
    assert (found.shapes, found.rows) == ([(64, 128)], [2])


@pytest.mark.parametrize("command", [bench, tune])
@pytest.mark.parametrize(("gpus", "reason"), [(0, "found 'cuda', but torch"), (1, "a GPU needs T")])
def test_without_a_gpu_or_triton_one_line_says_so(command, gpus, reason, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert command.main([]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {reason}")
    assert err.count("\n") == 1


def test_the_commands_are_imported_without_triton():
    own = "ptq, kernels.bench.gpu, kernels.bench.tune"
    code = f"import sys; sys.modules['triton'] = None; import {own}"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_an_interrupt_has_no_trace(monkeypatch, capsys):
    def interrupt(device):
        raise KeyboardInterrupt

    monkeypatch.setattr("kernels.devices.check_device", torch.device)
    assert run_on_gpu(interrupt) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_what_was_measured_stays(monkeypatch, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed (it is in the `test` extra)")

    def rows(self, problems):
        yield Row("w8a8", "first", 10.0, 5.0, 0.0)
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(bench, "measure_limits", lambda: LIMITS)
    monkeypatch.setattr(bench.Bench, "rows", rows)
    files = [tmp_path / "k.json", tmp_path / "k.md"]
    arguments = bench.parse(["--json", str(files[0]), "--markdown", str(files[1])])
    with pytest.raises(torch.OutOfMemoryError):
        bench.measure(arguments, CPU)
    assert json.loads(files[0].read_text())["rows"][0]["name"] == "first"
    assert "| first |" in files[1].read_text()


def test_the_selection_of_layers():
    pytest.importorskip("triton", reason="Triton is not installed (it is in the `test` extra)")
    from kernels.bench.cases import Selection

    whole = list(Selection().layers("w8a8"))
    assert (4096, 4096, 256) in whole
    assert (28672, 4096, 4096) in whole
    assert len(whole) == len(set(whole)) == 18
    table = list(Selection(table=True).layers("w4a16"))
    assert (28672, 4096, 4096) in table
    assert (4096, 4096, 64) not in table
    few = Selection(table=True, shapes=((64, 128),), rows=(5,)).layers("w4a16")
    assert list(few) == [(64, 128, 5)]
