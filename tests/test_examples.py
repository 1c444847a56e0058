"""The examples run as they are, from any folder, and end well."""

import os
import subprocess
import sys

import pytest

from tests.test_import_order import ROOT

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
SAYS = {  # the end of what each prints
    "budget": "what was chosen for each layer: output/examples/budget/recipe.yaml",
    "convert": "output/examples/convert-gptq [",
    "evaluate": "needle",
    "quantize": "class Node:",
    "serve_and_ask": "'completion_tokens': 16",
}


def test_every_example_is_run_and_can_be_again():
    assert set(EXAMPLES) == set(SAYS)
    for path in (ROOT / "examples").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("quantize(") == text.count("force=True"), path  # over what it wrote


@pytest.mark.ci  # a minute and a half of quantizing
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, tmp_path):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=1200,  # two cores that other tests keep busy
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
