"""Only the GPU's room imports Triton, and only backends know a device."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.test_import_order import ROOT, imported_modules

INFERENCE = ROOT / "inference"
BACKENDS = {"cpu", "gpu", "backend"}


def room_of(path: Path) -> str:
    return path.relative_to(INFERENCE).parts[0].removesuffix(".py")


FILES = [path for path in sorted(INFERENCE.rglob("*.py")) if room_of(path) != "__init__"]


def test_only_the_gpus_room_imports_triton():
    for path in FILES:
        found = [n for n in imported_modules(path) if n.startswith(("kernels.triton", "triton"))]
        assert room_of(path) == "gpu" or not found, f"{path}: {found}"


def test_only_backends_ask_which_device_it_is():
    for path in FILES:
        if room_of(path) in BACKENDS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            asked = isinstance(node, ast.Attribute) and (
                node.attr in ("is_cuda", "is_cpu", "triton")
                or (node.attr == "type" and "device" in ast.unparse(node.value))
            )
            assert not asked, f"{path}:{node.lineno}: {ast.unparse(node)}"
