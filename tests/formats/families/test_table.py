"""The table of families is what tiny models of them show, and is printed without them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from formats.families.registry import BY_TYPE
from formats.families.table import DOCUMENT, read_table, with_table
from ptq.commands.families import main
from tests.families_table import OTHERS, measured_row, write_tiny

ROWS = {row["family"]: row for row in read_table()}
AGAIN = "write the table again: python -m tests.families_table"


def test_every_declared_type_has_its_row():
    assert list(ROWS) == [*sorted(BY_TYPE), OTHERS["family"]], AGAIN
    assert with_table(read_table()) == DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", sorted(BY_TYPE))
def test_a_row_is_what_a_model_shows(tmp_path, kind):
    found = measured_row(kind, write_tiny(kind, tmp_path), tmp_path)
    assert found == {column: ROWS[kind][column] for column in found}, AGAIN


def test_a_command_prints_it(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["family", "smoothing"]
    assert [line.split()[0] for line in lines[1 : len(ROWS)]] == sorted(BY_TYPE)
    assert main(["olmo2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [ROWS["olmo2"]]
    assert main(["gpt2"]) == 0
    assert "No family of the name gpt2 is declared" in capsys.readouterr().out


def test_nothing_heavy_is_imported_for_it():
    code = (
        "import sys, ptq.commands.families as f; f.main([])\n"
        "print({'torch', 'transformers', 'pydantic'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] in ("set()", "{'pydantic'}")
