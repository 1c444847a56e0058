"""Environments of a test's own, that borrow this one's dependencies, and commands that run there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(folder: Path, layout: str, wheel: Path) -> tuple[Path, Path]:
    """Make a venv that sees this environment's dependencies; returns (python, site-packages)."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    target = {"checkout": [], "wheel": [str(wheel)], "editable": ["-e", str(ROOT)]}[layout]
    if target:
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
        command += ["--no-deps", "--no-index", "--no-build-isolation", *target]
        subprocess.run(command, check=True, capture_output=True, text=True)
    return python, site


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{command} in {cwd}:\n{done.stdout}\n{done.stderr}"
    return done
