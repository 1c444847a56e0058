"""What is installed: all that is imported, in the ranges and with the pins of the README's commands."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
OURS = {"calibrate", "formats", "inference", "kernels", "ptq", "recipes"}
NAMES = {"yaml": "pyyaml"}  # of packages whose distribution has another
BROUGHT = {"pydantic_core", "starlette", "tokenizers", "triton"}
"""By pydantic, fastapi, transformers and torch."""
FILE = ROOT / "tests/constraints.txt"


def pinned() -> dict[str, SpecifierSet]:
    """Each package of the file, with what it is held to."""
    lines = (line.partition("#")[0].strip() for line in FILE.read_text().splitlines())
    found = [Requirement(line) for line in lines if line]
    assert len({canonicalize_name(r.name) for r in found}) == len(found), "a package stands twice"
    return {canonicalize_name(r.name): r.specifier for r in found}


def wanted(*extras: str) -> list[Requirement]:
    """What pyproject.toml asks for: to run, and with extras, which may name others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for extra in extras for text in optional[extra])]
    found = [Requirement(text) for text in texts]
    others = [name for r in found if r.name == "ptq" for name in sorted(r.extras)]
    own = [r for r in found if r.name != "ptq"]
    return own + [Requirement(text) for name in others for text in optional[name]]


@pytest.mark.parametrize("requirement", wanted("test"), ids=lambda r: r.name)
def test_every_direct_dependency_is_pinned_inside_its_range(requirement):
    (pin,) = pinned()[canonicalize_name(requirement.name)]
    assert pin.operator == "=="
    assert "*" not in pin.version
    assert requirement.specifier.contains(pin.version)


def test_only_what_is_asked_for_is_pinned():
    """A pin that outlives its dependency would hold what others need."""
    names = {canonicalize_name(r.name) for r in wanted("test")}
    assert set(pinned()) - names <= {"psutil"}  # pytest-xdist's extra


def test_torch_has_no_upper_bound():
    (torch,) = (r for r in wanted() if r.name == "torch")
    assert torch.specifier.contains("99.0")


def test_the_commands_of_the_readme_name_the_file():
    lines = [
        x
        for x in (ROOT / "README.md").read_text().splitlines()
        if x.startswith("    pip install -e ")
    ]
    assert len(lines) == 2
    assert all(f"-c {FILE.relative_to(ROOT)} " in line for line in lines)


def imported() -> Iterator[str]:
    """Packages that our code imports, whether at once or later; what runs elsewhere aside."""
    for path in (file for room in OURS for file in (ROOT / room).rglob("*.py")):
        if "peers" in path.parts or path.name == "hatch_hook.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module


def test_every_package_that_is_imported_is_asked_for():
    tops = {name.partition(".")[0] for name in imported()}
    foreign = tops - OURS - BROUGHT - set(sys.stdlib_module_names) - {"peer_child"}
    asked = {
        canonicalize_name(r.name) for r in wanted("serve", "structured", "eval", "gguf", "ray")
    }
    assert {canonicalize_name(NAMES.get(name, name)) for name in foreign} <= asked
