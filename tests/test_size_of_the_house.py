"""The size of the source in numbers that go down, or up by a commit that says why.

`python -m tests.test_size_of_the_house` prints the numbers of today, and what stands for each.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.test_import_order import ROOT

ROOMS = ("ptq", "calibrate", "formats", "inference", "kernels", "recipes")
SOURCES = {".py", ".cpp", ".cu", ".cuh", ".h"}
# Words that have a plain or a technical one: returned, is, after, accepted, a user.
ODD_WORDS = re.compile(r"(?<![a-z])(told|lies|behind|came|whereof|somebody)(?![a-z])")

LIMITS = {
    "lines of source": 108_203,
    "files of source": 547,
    "lines of imports, in 1,000 lines of code": 82,
    "crowded classes": 3,
    "functions over 60 lines": 4,
    "files over 400 lines": 6,
    "odd words": 39,
    "lines of tests": 62_019,
}
# How far a number may fall below its limit before the limit is to follow.
SLACK = {"lines of source": 500, "lines of tests": 500, "files of source": 10, "odd words": 30}


@dataclass
class House:
    """What was counted; of what is listed, the places."""

    lines: int = 0
    files: int = 0
    code: int = 0
    imports: int = 0
    odd_words: int = 0
    test_lines: int = 0
    crowded: list[str] = field(default_factory=list)
    long_functions: list[str] = field(default_factory=list)
    long_files: list[str] = field(default_factory=list)

    def numbers(self) -> dict[str, int]:
        """Today's number of each limit."""
        return {
            "lines of source": self.lines,
            "files of source": self.files,
            "lines of imports, in 1,000 lines of code": round(1000 * self.imports / self.code),
            "crowded classes": len(self.crowded),
            "functions over 60 lines": len(self.long_functions),
            "files over 400 lines": len(self.long_files),
            "odd words": self.odd_words,
            "lines of tests": self.test_lines,
        }


def sources(rooms: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Path from the root, and text, of every file of source."""
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in SOURCES and path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def fields_of(node: ast.ClassDef) -> int:
    """Fields that a class declares, and those that its `__init__` sets."""
    declared = {ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            declared |= {
                target.attr
                for n in ast.walk(method)
                if isinstance(n, (ast.Assign, ast.AnnAssign))
                for target in (n.targets if isinstance(n, ast.Assign) else [n.target])
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            }
    return len(declared)


def is_crowded(node: ast.ClassDef) -> bool:
    """Whether a class does too much; a record of settings may have many fields."""
    methods = sum(isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in node.body)
    return methods > 20 or (methods > 4 and fields_of(node) > 15)


def count() -> House:
    """Counts of the checkout that this file is in."""
    house = House()
    for path, text in sources(ROOMS):
        lines = text.splitlines()
        house.files += 1
        house.lines += len(lines)
        if len(lines) > 400:
            house.long_files.append(f"{path}: {len(lines)}")
        if path.endswith(".py"):
            count_python(house, path, text)
    house.test_lines = sum(len(text.splitlines()) for _, text in sources(("tests",)))
    return house


def count_python(house: House, path: str, text: str) -> None:
    """Add what a file of Python holds."""
    house.code += sum(bool(line.strip()) and line.lstrip()[0] != "#" for line in text.splitlines())
    house.odd_words += len(ODD_WORDS.findall(text))
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.stmt) or node.end_lineno is None:
            continue
        length = node.end_lineno - node.lineno + 1
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            house.imports += length
        elif isinstance(node, ast.ClassDef) and is_crowded(node):
            house.crowded.append(f"{path}:{node.name}")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and length > 60:
            house.long_functions.append(f"{path}:{node.name}: {length}")


@pytest.fixture(scope="module")
def house() -> House:
    return count()


@pytest.mark.parametrize("name", LIMITS)
def test_the_house_does_not_grow(house, name):
    """Smaller is better; a capability that needs more raises its limit in a commit that says why."""
    number, limit = house.numbers()[name], LIMITS[name]
    assert number <= limit, f"{name}: {number}, over the limit of {limit}"
    assert number >= limit - SLACK.get(name, 0), f"{name}: lower the limit of {limit} to {number}"


def test_what_is_crowded_is_counted():
    """The counts see what they are for."""
    body = "\n".join(f"    def f{i}(self): ..." for i in range(21))
    methods = ast.parse(f"class Big:\n{body}").body[0]
    wide = "\n".join(f"        self.a{i} = {i}" for i in range(16))
    others = "\n".join(f"    def f{i}(self): ..." for i in range(4))
    fields = ast.parse(f"class Wide:\n    def __init__(self):\n{wide}\n{others}").body[0]
    small = ast.parse("class Small:\n    a: int\n    def f(self): ...").body[0]
    assert isinstance(methods, ast.ClassDef)
    assert is_crowded(methods)
    assert isinstance(fields, ast.ClassDef)
    assert is_crowded(fields)
    assert isinstance(small, ast.ClassDef)
    assert not is_crowded(small)
    assert ODD_WORDS.findall("is_told behind; applies, became") == ["told", "behind"]


def main() -> None:
    """Print today's numbers, and the places of those that are lists."""
    house = count()
    for name, number in house.numbers().items():
        print(f"{number:>7}  of {LIMITS[name]:>6}  {name}")
    for place in (*house.crowded, *house.long_functions, *house.long_files):
        print(f"         {place}")


if __name__ == "__main__":
    main()
