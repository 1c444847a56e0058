"""`ptq sweep` with real runs: its table, what failed apart from it, and a second start."""

import json
from pathlib import Path

import pytest

from ptq.commands import sweep
from tests.ptq.quantizing import FEW, write_recipe

SPEC = """\
models: [{path: MODEL, name: tiny}]
recipes:
  - w8_rtn
  - {recipe: w8_rtn, name: hungry, set: [dataset.evaluation.samples=9000000]}
set: SET
output: OUT
"""


@pytest.fixture
def spec(tmp_path, make_model) -> Path:
    write_recipe(tmp_path, tmp_path)  # for its text: the standard library takes a second
    settings = json.dumps([*FEW, f"dataset.name={tmp_path}/text.py"])
    text = SPEC.replace("MODEL", str(make_model())).replace("OUT", str(tmp_path / "out"))
    path = tmp_path / "sweep.yaml"
    path.write_text(text.replace("SET", settings))
    return path


def test_a_table_of_what_ran_and_apart_from_it_what_failed(spec, tmp_path, capsys):
    assert sweep.main([str(spec), "--quiet"]) == 2
    told = capsys.readouterr().out
    rows = [line for line in told.splitlines() if line.startswith("| tiny")]
    assert len(rows) == 1
    assert rows[0].startswith("| tiny | `w8_rtn` | w8 | rtn | x 0.")
    table, _, failures = told.partition("1 of 2 tasks failed:")
    assert "hungry" not in table
    needs = f"- tiny/hungry: dataset '{tmp_path}/text.py': evaluation needs 9000000 samples"
    assert needs in failures
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
