"""The tables of kernels without a GPU: peers compute what ours do, rows and files are right."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernels.bench.command as command
import kernels.bench.cpu_cases as cpu_cases
import kernels.bench.measure as measure
import kernels.bench.peers.torch_peers as peers
from kernels.bench.case import BenchCase, Clock, Limits, copies_of, in_turns
from kernels.bench.measure import Bench, Published, Row, cells, line, published
from kernels.bench.peers.torch_peers import TOLERANCE, Peers
from kernels.bench.shapes import (
    CPU_FAMILIES,
    FAMILIES,
    LAYERS,
    SMALL_FLOATS,
    TABLE,
    AttentionShape,
    Gemm,
    Rows,
    Selection,
)
from kernels.cpu import native
from kernels.devices import run_on_gpu

FLASH = peers.OF_ATTENTION["cuda"][0].build
ALONE = ("w8a16", "w16a16", *SMALL_FLOATS)  # families of which torch multiplies floats alone
CPU, GPU = torch.device("cpu"), torch.device("cuda")
LIMITS = Limits("Chip", 1e6, {"16 bits": 5e8, "8 bits": 1e9})
compiled = pytest.mark.skipif(native.library() is None, reason="no compiled kernels")


@pytest.fixture(autouse=True)
def few_copies(monkeypatch):
    monkeypatch.setattr("kernels.bench.case.ROTATED", {"cuda": 3e6, "cpu": 3e6})


def layer(family: str, rows: int = 32, group: int = 128, dtype: str = "bfloat16") -> Gemm:
    return Gemm(family, rows, 256, 384, group, dtype)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (peers.linear, layer("w4a16", dtype="float16")),
        (peers.linear, layer("fp8", dtype="float32")),
        (peers.fp32_linear, layer("w16a16", dtype="float32")),
        (peers.tinygemm, layer("w4a16")),
        (peers.tinygemm, layer("w4a16_g64", 3, 64)),
        (peers.int8_pack_mm, layer("w8a16", dtype="float32")),
        (peers.int_mm, layer("w8a8")),
        (peers.int_mm, layer("w8a8", 1, dtype="float32")),
        (peers.scaled_mm, layer("fp8", 3)),
        (FLASH, AttentionShape(2, 64)),
        (FLASH, AttentionShape(2, 96, 32)),
        (FLASH, AttentionShape(1, 48, 48)),
        (peers.OF_ATTENTION["cpu"][1].build, AttentionShape(1, 64)),
        (peers.copy, Rows("rope", 1, 1001, 1001)),
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
        (peers.tinygemm, layer("w4a16", dtype="float16"), "bf16"),
        (peers.int_mm, layer("w8a8", 16), "more than 16 rows"),
        (peers.scaled_mm_blocks, Gemm("fp8_block", 8, 200, 384, 384), "whole blocks"),
        (FLASH, AttentionShape(17, 64, 1, even=False), "equal numbers"),
    ],
)
def test_what_torch_lacks_has_a_reason(build, shape, reason):
    with pytest.raises(peers.UnavailableError, match=reason):
        build(shape, GPU)


def test_every_family_of_layers_has_peers():
    for family in LAYERS:
        found = [peer.name for peer in peers.peers_for(layer(family), GPU)]
        assert found[-1] == "F.linear"
        assert len(found) == (1 if family.startswith(ALONE) else 2), found
    assert peers.peers_for(layer("fp8_block"), GPU)[0].name == "scaled_mm 128"
    assert peers.peers_for(Rows("sample", 1, 1, 1), GPU) == ()
    assert all(peers.peers_for(layer(family), CPU) for family in CPU_FAMILIES[:-2])


def a_sample(call, copies):
    return lambda: 7.0


def test_peers_are_made_and_reasons_are_counted(monkeypatch):
    found = Peers(CPU, sample=a_sample)
    assert list(found.of(layer("w8a8", 3))) == ["_int_mm", "F.linear"]
    found = Peers(GPU, sample=a_sample)
    monkeypatch.setattr(peers, "peers_for", lambda shape, device: (peers.INT_MM,))
    assert found.of(layer("w8a8", 3)) == {}
    found.of(layer("w4a8", 3))
    assert found.reasons[("_int_mm", "it takes more than 16 rows")] == 2
    assert "_int_mm: it takes more than 16 rows (2 rows)" in found.messages()


def test_a_peer_that_is_wrong_or_refused_is_not_timed(monkeypatch):
    def never(call, copies):
        raise AssertionError("timed")

    monkeypatch.setattr("kernels.bench.peers.torch_peers.TOLERANCE", 1e-9)
    found = Peers(CPU, sample=never)
    assert found.of(layer("w8a8")) == {}
    assert all("its result is off by" in reason for _, reason in found.reasons)
    monkeypatch.setattr("kernels.bench.peers.torch_peers.TOLERANCE", 1e-2)
    monkeypatch.setitem(peers.OF_ATTENTION, "cpu", peers.OF_ATTENTION["cuda"])
    cudnn = Peers(CPU, sample=a_sample)
    assert list(cudnn.of(AttentionShape(2, 64))) == ["flash sdpa"]
    ((name, reason),) = cudnn.reasons
    assert name == "cudnn sdpa"
    assert reason.startswith("torch refuses: No viable backend")


def a_case(shape: Any = None, wrong: bool = False, **rest: Any) -> BenchCase:
    shape = shape or layer("w4a16")
    error, ones = 1.0 if wrong else 1e-3, torch.ones(1)
    return BenchCase("a case", shape, lambda *_: ones, 1, 5_000_000, lambda y: error, 1e-2, **rest)


@pytest.fixture
def clock(monkeypatch):
    """Calls take as long as the case's cut says, 10 us by default."""

    def sample(call, copies):
        call(0)
        return lambda: 10.0

    fixed = {"cuda": Clock(sample, 0.5, 2), "cpu": Clock(sample, 0.5, 2)}
    monkeypatch.setattr("kernels.bench.case.CLOCKS", fixed)
    monkeypatch.setattr("kernels.bench.measure.CLOCKS", fixed)


def test_the_floor_is_the_larger_of_bytes_and_products():
    assert LIMITS.floor(a_case()) == 5.0
    assert LIMITS.floor(a_case(operations=5e9)) == 10.0
    assert LIMITS.floor(a_case(operations=5e9, unit="8 bits")) == 5.0


def test_rows_are_measured_and_wrong_ones_told(clock, monkeypatch):
    class Some(Peers):
        def of(self, shape):
            return {"slow": lambda: 30.0, "fast": lambda: 20.0} if shape.rows > 3 else {}

    run = Bench(LIMITS, Some(CPU))
    monkeypatch.setattr(run, "added", lambda shape: 0.5)
    cases = [
        ("w4a16", a_case()),
        ("w8a8", a_case(wrong=True)),
        ("w8a8", a_case(layer("w8a8", 3))),
        ("sampling", a_case(Rows("sample", 1, 1, 1))),
    ]
    found = list(run.rows(cases))
    assert [row.family for row in found] == ["w4a16", "w8a8", "sampling"]
    assert run.wrong == ["a case with None: error 1.0, allowed is 0.01"]
    own = ["10.00", "5.00", "50%", "1.0e-03"]
    assert cells("cuda", found[0])[1:] == [*own, "-", "-", "-", "20.00", "2.00", "fast", *"---"]
    assert cells("cuda", found[1])[5:] == ["0.50", *"--------"]
    assert cells("cpu", found[0])[1:] == [*own, "500.0", "-", "20.00", "2.00", "fast"]


def test_a_kernel_with_stated_layouts_shows_its_gain_over_the_fastest_plain_one(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed (it is in the `test` extra)")
    took = {None: 10.0, "small": 15.0, "large": 12.0}

    def sample(self, cut=None):
        return lambda: took[cut]

    monkeypatch.setattr(BenchCase, "sample", sample)
    row = Bench(LIMITS).row("w4a16", a_case(twins=("small", "large")))
    assert (row.us, row.plain) == (10.0, 12.0)
    assert cells("cuda", row)[6:8] == ["12.00", "+20%"]
    assert Bench(LIMITS).row("w4a16", a_case()).gain is None


def test_published_times_are_of_the_same_device_and_shape():
    shape = Gemm.of("w4a16", 64, 28672, 4096)
    assert published("NVIDIA H200", shape) == Published(44.2, "Machete", False)
    cutlass = published("NVIDIA H200", Gemm.of("w8a8", 1, 4096, 14336))
    assert cutlass == Published(26.6, "CUTLASS", True)
    attention = AttentionShape(16, 4096, cache="float8_e4m3fn")
    found = published("NVIDIA H100 80GB HBM3", attention)
    assert found.us == 59.4
    others = (replace(shape, rows=63), replace(shape, dtype="float16"), Rows("norm", 1, 1, 1))
    assert not any(published("NVIDIA H200", other) for other in others)
    assert published("NVIDIA A100-SXM4-80GB", shape) is None
    assert "vLLM 0.26" in str(measure.source("NVIDIA H200"))


def test_a_published_peer_that_quantizes_is_compared_with_what_that_adds():
    row = Row("w8a8", "x", 30.0, 5.0, 0.0, added=2.0, published=Published(40.0, "CUTLASS", True))
    assert row.against_published == 1.25
    assert cells("cuda", row)[-3:] == ["40.00", "1.25", "CUTLASS"]
    alone = replace(row, published=Published(40.0, "Machete", False))
    assert alone.against_published == pytest.approx(4 / 3)


def test_files_hold_every_row():
    row = Row("w8a8", "x", 10.0, 5.0, 1e-3, 0, 0.0, 0.5, 12.0, {"F.linear": 20.0})
    other = replace(row, published=Published(40.0, "Machete", False))
    limits = replace(LIMITS, device="NVIDIA H200")
    text = measure.markdown("cuda", limits, [row, other], ["_int_mm: few (1 rows)"])
    lines = text.splitlines()
    assert lines[0].startswith("NVIDIA H200, torch")
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4
    assert {line.count("|") for line in table} == {len(measure.COLUMNS["cuda"]) + 1}
    assert lines[-2] == "- _int_mm: few (1 rows)"
    assert lines[-1].startswith("- published: vLLM 0.26")
    data = json.loads(measure.to_json(LIMITS, [row], {("_int_mm", "few"): 1}))
    assert data["rows"][0]["peers"] == {"F.linear": 20.0}
    assert (data["rows"][0]["added"], data["rows"][0]["gain"]) == (0.5, pytest.approx(0.2))
    assert data["missing"] == [{"peer": "_int_mm", "reason": "few", "rows": 1}]
    assert data["limits"]["device"] == "Chip"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_lines_are_aligned(device):
    row = Row("w8a8", "a name", 10.0, 5.0, 1e-3, 100, 0.0, 0.5, None, {"copy": 4.0})
    titles, found = line(device, measure.header(device)), line(device, cells(device, row))
    place = titles.index("op") if device == "cpu" else titles.index(" op ") + 1
    assert found.index("copy") == place


def test_whoever_is_compared_takes_turns():
    order = []
    samples = [lambda name=name: order.append(name) or len(order) for name in "AB"]
    assert in_turns(samples, range(2)) == [[1, 3], [2, 4]]
    assert "".join(order) == "ABAB"
    ticks = iter(range(100))
    assert Clock(a_sample, 0.2, 6).times([lambda: next(ticks)]) == [1.0]
    assert copies_of(1e6) == 4
    assert copies_of(1e9) == 1


def arguments_of(*texts: str) -> argparse.Namespace:
    return command.parse_kernels(["--device", "cuda", *texts])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["w4"], "found family 'w4'; allowed on a cuda are w4a16"),
        (["--table", "sampling"], "found family 'sampling'; allowed on a cuda are w4a16, w4a8"),
        (["--device", "cpu", "prefill"], "found family 'prefill'; allowed on a cpu are w8a8"),
        (["--device", "tpu"], "found 'tpu'; allowed are cuda and cpu"),
        (["--shapes", "4096"], "write outputs x inputs"),
        (["--shapes", "4096x100"], "multiples of 64 outputs and 128 inputs"),
        (["--shapes", "0x128"], "multiples of 64 outputs and 128 inputs"),
        (["--rows", "0"], "a whole number from 1 on"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        arguments_of(*arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--shapes", "4096"], ["--rows", "0"], ["--families", "w4"]])
def test_tuning_refuses_them_too(arguments):
    with pytest.raises(SystemExit) as caught:
        command.tune(arguments)
    assert caught.value.code == 2


def test_arguments_are_resolved():
    assert arguments_of().families == FAMILIES
    found = arguments_of("--table", "--shapes", "64x128", "--rows", "2")
    assert found.families == tuple(TABLE)
    assert (found.shapes, found.rows, found.peers) == ([(64, 128)], [2], False)
    own = arguments_of("--device", "cpu")
    assert (own.families, own.peers) == (CPU_FAMILIES, True)


@pytest.mark.parametrize(
    "run", [lambda: command.kernels(["--device", "cuda"]), lambda: command.tune([])]
)
@pytest.mark.parametrize(("gpus", "reason"), [(0, "found 'cuda', but torch"), (1, "a GPU needs T")])
def test_without_a_gpu_or_triton_one_line_says_so(run, gpus, reason, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert run() == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {reason}")
    assert err.count("\n") == 1


def test_without_a_compiler_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(native, "library", lambda: None)
    assert command.kernels(["--device", "cpu"]) == 2
    assert "install a C++ compiler" in capsys.readouterr().err


def test_the_commands_are_imported_without_triton():
    own = "kernels.bench.measure, kernels.bench.tune, kernels.bench.cpu_cases"
    code = f"import sys; sys.modules['triton'] = None; import ptq, {own}"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_an_interrupt_has_no_trace(monkeypatch, capsys):
    def interrupt(device):
        raise KeyboardInterrupt

    monkeypatch.setattr("kernels.devices.check_device", torch.device)
    assert run_on_gpu(interrupt) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_what_was_measured_stays(monkeypatch, tmp_path):
    def rows(self, cases):
        yield Row("w8a8", "first", 10.0, 5.0, 0.0)
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(measure, "limits_of", lambda device: LIMITS)
    monkeypatch.setattr(measure.Bench, "rows", rows)
    files = [tmp_path / "k.json", tmp_path / "k.md"]
    written = ("--json", str(files[0]), "--markdown", str(files[1]))
    arguments = arguments_of("--device", "cpu", *written)
    with pytest.raises(torch.OutOfMemoryError):
        measure.measure(arguments, CPU)
    assert json.loads(files[0].read_text())["rows"][0]["name"] == "first"
    assert "| first |" in files[1].read_text()


@compiled
def test_the_ops_of_a_cpu_are_right_beside_their_peers(monkeypatch, capsys):
    """Every case of every family, small: checked against its twin, and so are its peers."""
    monkeypatch.setattr(cpu_cases, "CPU_CONTEXTS", (128,))
    quick = Clock(cpu_cases.calls, 0.2, 1)
    monkeypatch.setattr("kernels.bench.measure.CLOCKS", {"cpu": quick})
    monkeypatch.setattr(measure, "limits_of", lambda device: replace(LIMITS, rates=RATES))
    arguments = ["--device", "cpu", "--shapes", "192x256", "--rows", "1", "5"]
    assert command.kernels(arguments) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith(CPU_FAMILIES[:-1])]
    assert len(rows) == 2 * 6 + 5
    assert sum(text.startswith(("norm", "silu", "quant")) for text in out.splitlines()) == 6
    assert "off by" not in out


RATES = {"f32": 1e6, "int8": 1e6, "int4": 1e6}


def test_every_family_has_its_cases():
    pytest.importorskip("triton", reason="Triton is not installed (it is in the `test` extra)")
    from kernels.bench import gpu_attention, gpu_cases

    assert {*gpu_attention.CASES, *gpu_cases.CASES} == set(FAMILIES)
    assert set(cpu_cases.CASES) == set(CPU_FAMILIES)


def test_the_selection_of_layers():
    whole = list(Selection().layers("w8a8"))
    assert (4096, 4096, 256) in whole
    assert (28672, 4096, 4096) in whole
    assert len(whole) == len(set(whole)) == 18
    table = list(Selection(table=True).layers("w4a16"))
    assert (28672, 4096, 4096) in table
    assert (4096, 4096, 64) not in table
    few = Selection(table=True, shapes=((64, 128),), rows=(5,)).layers("w4a16")
    assert list(few) == [(64, 128, 5)]
