"""The floors of ptq: nothing is imported from above, and what quantizes does not know the engine."""

from __future__ import annotations

import pytest

from tests.test_import_order import ROOT, imported_modules

PTQ = ROOT / "ptq"
FLOORS = (
    ("text", "version"),
    ("methods",),
    ("recipe",),
    ("result",),
    ("plan",),
    ("pipeline",),
    ("peers",),
    ("report", "convert"),
    ("commands",),
    ("cli", "api"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
DOORS = {"__init__.py", "__main__.py"}  # of a package: they stand above all of its rooms
QUANTIZING = ("methods", "recipe", "plan", "pipeline")


def room_of(path) -> str:
    return path.relative_to(PTQ).parts[0].removesuffix(".py")


FILES = [path for path in sorted(PTQ.rglob("*.py")) if path.name not in DOORS]
ROOMS = {path: room_of(path) for path in FILES if room_of(path) in FLOOR}


def test_every_file_stands_on_a_floor():
    others = {str(path.relative_to(PTQ)) for path in FILES if path not in ROOMS}
    assert others <= {"check.py", "inspect.py", "run.py"}  # doors: python -m ptq.run


@pytest.mark.parametrize("path", list(ROOMS), ids=lambda path: str(path.relative_to(PTQ)))
def test_rooms_import_only_from_the_floors_below(path):
    own = ROOMS[path]
    others = {name.split(".")[1] for name in imported_modules(path) if name.startswith("ptq.")}
    for other in others - {own}:
        assert FLOOR[other] < FLOOR[own], f"{own} imports {other}"


def test_what_methods_share_knows_no_method():
    for path in (PTQ / "methods" / "common").glob("*.py"):
        found = {n for n in imported_modules(path) if n.startswith("ptq.methods.")}
        assert all(n.startswith("ptq.methods.common") for n in found), f"{path}: {found}"


def test_quantizing_does_not_import_the_engine():
    allowed = {"inference.bench.peers.spec"}  # what a recipe's peers are
    for path, room in ROOMS.items():
        if room in QUANTIZING:
            engine = {n for n in imported_modules(path) if n.startswith("inference")}
            assert engine <= allowed, f"{path.relative_to(PTQ)} imports {engine - allowed}"
