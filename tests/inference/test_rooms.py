"""Only what is the GPU's imports Triton, and only backends know a device."""

import ast
from pathlib import Path

from tests.test_import_order import ROOT, imported_modules

INFERENCE = ROOT / "inference"
BACKENDS = {"cpu", "gpu", "backend"}
OF_GPUS = {"parallel/gpu.py"}  # ranks' side of them, beside that of CPUs
OF_RANKS = {"parallel/backend.py", "parallel/gpu.py"}  # a backend over a device's own


def room_of(path: Path) -> str:
    return path.relative_to(INFERENCE).parts[0].removesuffix(".py")


def is_one(path: Path, files: set[str]) -> bool:
    return path.relative_to(INFERENCE).as_posix() in files


FILES = [path for path in sorted(INFERENCE.rglob("*.py")) if room_of(path) != "__init__"]


def test_only_what_is_the_gpus_imports_triton():
    for path in FILES:
        found = [n for n in imported_modules(path) if n.startswith(("kernels.triton", "triton"))]
        assert room_of(path) == "gpu" or is_one(path, OF_GPUS) or not found, f"{path}: {found}"


def test_only_backends_ask_which_device_it_is():
    for path in FILES:
        if room_of(path) in BACKENDS or is_one(path, OF_RANKS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            asked = isinstance(node, ast.Attribute) and (
                node.attr in ("is_cuda", "is_cpu", "triton")
                or (node.attr == "type" and "device" in ast.unparse(node.value))
            )
            assert not asked, f"{path}:{node.lineno}: {ast.unparse(node)}"
