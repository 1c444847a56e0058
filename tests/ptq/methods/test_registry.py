"""Methods are found by their files, and what a recipe may say of them is known without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from ptq.methods import registry
from ptq.methods.common.spec import MethodSpec, Stage

FOLDER = Path(registry.__file__).parent
FILES = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "registry"}


def test_every_file_is_one_method_of_its_name():
    assert set(registry.METHODS) == FILES
    for name, spec in registry.METHODS.items():
        assert spec.__module__ == f"ptq.methods.{name}"


def test_methods_are_listed_in_the_order_of_a_recipe():
    stages = [spec.stage for spec in registry.METHODS.values()]
    assert stages == sorted(stages)
    assert set(stages) == set(Stage)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_method_works_on_blocks_or_gives_a_view(name):
    spec = registry.METHODS[name]
    views = spec.view is not MethodSpec.view
    assert (spec().algorithm() is not None) or views


def test_specifications_are_read_without_torch():
    script = "import sys; import ptq.methods.registry; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_no_method_is_named_outside_of_the_room():
    """Whoever plans, explains or drives a run asks specifications what it needs to know."""
    ptq = FOLDER.parent
    for path in ptq.rglob("*.py"):
        if FOLDER not in path.parents:
            text = path.read_text(encoding="utf-8")
            own = {"costs"} if path.parent.name == "search" else set()  # its other half
            named = [name for name in {*FILES} - own if f"ptq.methods.{name} " in text]
            assert not named, f"{path.relative_to(ptq)} imports {named}"
