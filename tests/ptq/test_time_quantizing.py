"""The bench of quantizing itself: it makes a model, quantizes it and tells the time by phase."""

import json

from ptq import time_quantizing


def test_it_tells_the_seconds_of_each_phase_and_of_the_whole_shape(tiny_llama, tmp_path, capsys):
    given = ["--shape", str(tiny_llama), "--blocks", "1", "--samples", "2", "--length", "16"]
    work = tmp_path / "work"
    assert time_quantizing.main(["w4_rtn", *given, "--work", str(work)]) == 0
    told = capsys.readouterr().out
    blocks = json.loads((tiny_llama / "config.json").read_text())["num_hidden_layers"]
    assert f"{blocks} blocks: " in told
    assert all(f" {phase} " in told for phase in ("observe", "rtn", "write", "total"))
    assert not (work / "w4_rtn-output").exists()


def test_runs_on_several_devices_are_told_beside_the_first(tiny_llama, tmp_path, capsys):
    given = ["--shape", str(tiny_llama), "--blocks", "1", "--samples", "2", "--length", "16"]
    given += ["--work", str(tmp_path / "work"), "--cpus", "1", "2"]
    assert time_quantizing.main(["w4_rtn", *given]) == 0
    told = capsys.readouterr().out
    assert "device: {cpus: 1}" in told
    assert "device: {cpus: 2}" in told
    assert told.endswith("; the same bytes\n")


def test_a_run_beside_the_first_names_files_that_differ():
    first = time_quantizing.Timed([], 10.0, 1.0, {"a": "1", "b": "2"})
    second = time_quantizing.Timed([], 6.0, 0.5, {"a": "1", "b": "3", "c": "4"})
    compared = time_quantizing._compared
    assert compared(second, first).endswith("block 50%; OTHER BYTES in b, c")
    assert compared(first, first) == "100% of the first run's time, a block 100%; the same bytes"
