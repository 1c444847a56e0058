"""The walls of the house: which of our packages each package may import."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "formats", "calibrate", "inference", "ptq")
ALLOWED = {
    "kernels": {"kernels"},
    "formats": {"formats"},
    "calibrate": {"calibrate", "formats", "kernels"},
    "inference": {"inference", "formats", "kernels"},
    "ptq": set(ROOMS),
}
CALIBRATE_MAY_USE = {
    "formats.errors",
    "formats.files",
    "formats.namespace",
    "formats.scheme",
    "kernels.numerics",
}


def imported_modules(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def sources(room: str) -> list[Path]:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, f"no sources in {room}"
    return files


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_what_it_may(room):
    for path in sources(room):
        rooms = {name.split(".")[0] for name in imported_modules(path)} & set(ROOMS)
        assert rooms <= ALLOWED[room], f"{path.relative_to(ROOT)} imports {rooms - ALLOWED[room]}"


def test_calibrate_uses_only_vocabulary_and_numerics():
    for path in sources("calibrate"):
        ours = {n for n in imported_modules(path) if n.split(".")[0] in {"formats", "kernels"}}
        ours = {name for name in ours if not name.startswith("formats.families.")}
        assert ours <= CALIBRATE_MAY_USE, f"{path.relative_to(ROOT)} imports {ours}"


def test_what_runs_in_a_peers_interpreter_imports_nothing_of_ours():
    quantizers, runtimes = ROOT / "ptq/peers", ROOT / "inference/bench/peers"
    files = [runtimes / "child.py", runtimes / "run_loads.py", quantizers / "quantize_job.py"]
    for folder in (quantizers, runtimes):
        files += (folder / "adapters").glob("*.py")
    assert len(files) == 11
    for path in files:
        assert not {name.split(".")[0] for name in imported_modules(path)} & set(ROOMS), path


def test_kernels_is_imported_by_module_name():
    """`from kernels import ops` breaks where a foreign package owns the name."""
    for path in ROOT.rglob("*.py"):
        if ".venv" not in path.parts:
            assert "kernels" not in imported_modules(path), f"{path}: import the module by its name"


def test_kernels_has_no_init():
    assert not list((ROOT / "kernels").rglob("__init__.py"))
