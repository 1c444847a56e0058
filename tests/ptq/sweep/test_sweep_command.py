"""`ptq sweep` with real runs: its table, what failed apart from it, and a second start."""

from pathlib import Path

import pytest

from ptq.commands import sweep

SPEC = """\
models: [{path: MODEL, name: tiny}]
recipes:
  - w8_rtn
  - {recipe: w8_rtn, name: hungry, set: [dataset.evaluation.samples=9000000]}
set:
  - dataset.calibration.samples=2
  - dataset.evaluation.samples=2
  - dataset.calibration.sequence_length=32
  - dataset.evaluation.sequence_length=32
  - report.speed=false
  - report.attribution=false
  - report.completions=0
output: OUT
"""


@pytest.fixture
def spec(tmp_path, make_model) -> Path:
    path = tmp_path / "sweep.yaml"
    text = SPEC.replace("MODEL", str(make_model())).replace("OUT", str(tmp_path / "out"))
    path.write_text(text)
    return path


def test_a_table_of_what_ran_and_apart_from_it_what_failed(spec, tmp_path, capsys):
    assert sweep.main([str(spec), "--quiet"]) == 2
    told = capsys.readouterr().out
    rows = [line for line in told.splitlines() if line.startswith("| tiny")]
    assert len(rows) == 1
    assert rows[0].startswith("| tiny | `w8_rtn` | w8 | rtn | x 0.")
    table, _, failures = told.partition("1 of 2 tasks failed:")
    assert "hungry" not in table
    assert "- tiny/hungry: dataset 'stdlib': evaluation needs 9000000 samples" in failures
    assert f"--set dataset.evaluation.samples=9000000 --output {tmp_path}/out/tiny/hungry" in told
    assert (tmp_path / "out/sweep.md").read_text() in told

    spec.write_text("\n".join(line for line in spec.read_text().splitlines() if "hun" not in line))
    log = tmp_path / "out/tiny/w8_rtn.log"
    before = log.stat().st_mtime_ns
    assert sweep.main([str(spec)]) == int("Red: " in told)
    told = capsys.readouterr().out
    assert told.startswith("1 of 1 tasks have run before")
    assert rows[0] in told
    assert "failed" not in told
    assert log.stat().st_mtime_ns == before  # it was not run again
