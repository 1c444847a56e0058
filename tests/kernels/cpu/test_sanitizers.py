"""The compiled kernels under the address and undefined-behaviour sanitizers.

The library is built with them, and the tests of kernels run again in a process of their own: a read
or write beyond a tensor, a misaligned access or an undefined shift ends it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build, native

FLAGS = (
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    *("-g1", "-O1"),
)
FOLDER = Path(__file__).parent
FILES = [*sorted(FOLDER.glob("test_native_*.py")), FOLDER / "test_linear.py"]
FILES += [FOLDER / "test_attention.py", FOLDER / "test_elementwise.py"]
FILES += [FOLDER.parents[1] / "inference" / "cpu" / "test_fused.py"]


def runtime_of(name: str) -> str | None:
    """Path of a sanitizer's shared runtime, where the compiler has one."""
    command = [build.compiler(), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return path if Path(path).is_absolute() else None


@pytest.mark.ci  # compiles the kernels with sanitizers, and they are slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
def test_kernels_read_and_write_only_what_is_theirs(tmp_path):
    runtimes = [runtime_of(name) for name in ("libasan.so", "libubsan.so")]
    if None in runtimes:
        pytest.skip("the compiler has no shared sanitizer runtimes")
    library = build.build(tmp_path, FLAGS)
    settings = {
        "LD_PRELOAD": " ".join(str(path) for path in runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "2",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-o", "addopts=", f"--native-library={library}", *map(str, FILES)]
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
