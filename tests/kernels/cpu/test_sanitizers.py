"""The compiled kernels under the address and undefined-behaviour sanitizers.

The library is built with them, and the tests of kernels run again in a process of their own: a read
or write beyond a tensor, a misaligned access or an undefined shift ends it. What was built is kept
in the cache: it is built again where a source or a flag has changed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build, native

FLAGS = (
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    # What these find is found by the address sanitizer once memory is touched; they would take a
    # third of the time to compile.
    "-fno-sanitize=null,object-size,pointer-overflow",
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
def test_kernels_read_and_write_only_what_is_theirs():
    runtimes = [runtime_of(name) for name in ("libasan.so", "libubsan.so")]
    if None in runtimes:
        pytest.skip("the compiler has no shared sanitizer runtimes")
    flags = hashlib.sha256(repr(FLAGS).encode()).hexdigest()[:16]
    library = build.build(native.cache_folder() / f"sanitizers-{flags}", FLAGS)
    settings = {
        "LD_PRELOAD": " ".join(str(path) for path in runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",  # threads that wait leave the processor to others
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
