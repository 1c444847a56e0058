"""Packages that only some tests need, fetched once into the cache; only in CI."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.native import cache_folder


def fetched(package: str, version: str, megabytes: int) -> Path:
    """A folder with a version of a package, kept in the cache; skips where that cannot be had."""
    folder = cache_folder() / f"{package}-{version}"
    if folder.exists():
        return folder
    if os.environ.get("CI") != "true":
        pytest.skip(f"{package} {version} ({megabytes} MB) is fetched under CI alone: CI=1 pytest")
    draft = folder.with_suffix(f".{os.getpid()}")
    options = ["--no-deps", "--retries", "0", "--target", str(draft), f"{package}=={version}"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options], capture_output=True, text=True
    )
    if done.returncode:
        shutil.rmtree(draft, ignore_errors=True)
        pytest.skip(f"no index gives {package} {version}: {done.stderr.strip().splitlines()[-1]}")
    try:
        draft.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(draft)  # another process was faster
    return folder
