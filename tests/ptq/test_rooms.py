"""The rooms of ptq: who may know a method or the engine; `tests.test_import_order` has their floors."""

from tests.test_import_order import ROOT, imported_modules

PTQ = ROOT / "ptq"
COMMAND_DOORS = {"check", "inspect", "run"}  # python -m ptq.run
DOORS = {"__init__.py", "__main__.py"}  # of a package: they stand above all of its rooms
QUANTIZING = ("methods", "recipe", "plan", "pipeline")


def room_of(path) -> str:
    return path.relative_to(PTQ).parts[0].removesuffix(".py")


FILES = [path for path in sorted(PTQ.rglob("*.py")) if path.name not in DOORS]
ROOMS = {path: room_of(path) for path in FILES if room_of(path) not in COMMAND_DOORS}


def test_what_methods_share_knows_no_method():
    for path in (PTQ / "methods" / "common").glob("*.py"):
        found = {n for n in imported_modules(path) if n.startswith("ptq.methods.")}
        assert all(n.startswith("ptq.methods.common") for n in found), f"{path}: {found}"


def test_quantizing_does_not_import_the_engine():
    allowed = {"inference.bench.peers.process"}  # what a recipe's peers are
    for path, room in ROOMS.items():
        if room in QUANTIZING:
            engine = {n for n in imported_modules(path) if n.startswith("inference")}
            assert engine <= allowed, f"{path.relative_to(PTQ)} imports {engine - allowed}"
