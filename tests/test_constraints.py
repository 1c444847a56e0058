"""The constraints that the README's commands name: exact, whole, inside pyproject's ranges."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests/constraints.txt"


def pinned() -> dict[str, SpecifierSet]:
    """Each package of the file, with what it is held to."""
    lines = (line.partition("#")[0].strip() for line in FILE.read_text().splitlines())
    found = [Requirement(line) for line in lines if line]
    assert len({canonicalize_name(r.name) for r in found}) == len(found), "a package stands twice"
    return {canonicalize_name(r.name): r.specifier for r in found}


def wanted() -> list[Requirement]:
    """What pyproject.toml asks for: to run, and to test."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["test"]
    return [Requirement(text) for text in (*project["dependencies"], *extra)]


@pytest.mark.parametrize("requirement", wanted(), ids=lambda r: r.name)
def test_every_direct_dependency_is_pinned_inside_its_range(requirement):
    (pin,) = pinned()[canonicalize_name(requirement.name)]
    assert pin.operator == "=="
    assert "*" not in pin.version
    assert requirement.specifier.contains(pin.version)


def test_only_what_is_asked_for_is_pinned():
    """A pin that outlives its dependency would hold what others need."""
    names = {canonicalize_name(r.name) for r in wanted()}
    assert set(pinned()) - names <= {"psutil"}  # pytest-xdist's extra


def test_torch_has_no_upper_bound():
    (torch,) = (r for r in wanted() if r.name == "torch")
    assert torch.specifier.contains("99.0")


def test_the_commands_of_the_readme_name_the_file():
    lines = [x for x in (ROOT / "README.md").read_text().splitlines() if x.startswith("    pip ")]
    assert len(lines) == 2
    assert all(f"-c {FILE.relative_to(ROOT)} " in line for line in lines)
