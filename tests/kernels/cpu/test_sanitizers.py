"""The compiled kernels under the sanitizers: of addresses and undefined behaviour, and of threads.

The library is built with them, and tests run again in a process of their own: a read or write beyond
a tensor, a misaligned access, an undefined shift, or two threads at one place of which neither waits
for the other, ends it. What was built is kept in the cache: it is built again where a source or a
flag has changed.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build, native

MEMORY = (
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    # What these find is found by the address sanitizer once memory is touched; they would take a
    # third of the time to compile.
    "-fno-sanitize=null,object-size,pointer-overflow",
    *("-g1", "-O1"),
)
THREADS = ("-fsanitize=thread", "-pthread", "-g1", "-O1")
FOLDER = Path(__file__).parent
FILES = [
    *sorted(FOLDER.glob("test_native_*.py")),
    FOLDER / "test_linear.py",
    FOLDER / "test_attention.py",
]
DECODER = FOLDER.parents[1] / "inference" / "cpu"


def run_under(flags: tuple[str, ...], runtimes: list[str], settings: dict[str, str], *files: Path):
    """Tests on kernels that are built with a sanitizer's flags; its complaint ends them."""
    found = [runtime_of(name) for name in runtimes]
    if None in found:
        pytest.skip("the compiler has no shared sanitizer runtimes")
    key = hashlib.sha256(repr(flags).encode()).hexdigest()[:16]
    library = build.build(native.cache_folder() / f"sanitizers-{key}", flags)
    settings |= {
        "LD_PRELOAD": " ".join(str(path) for path in found),
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",  # threads that wait leave the processor to others
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:xdist"]
    command += ["-p", "no:cacheprovider", "-o", "addopts="]
    command += [f"--native-library={library}", *map(str, files)]
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def runtime_of(name: str) -> str | None:
    """Path of a sanitizer's shared runtime, where the compiler has one."""
    command = [build.compiler(), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return path if Path(path).is_absolute() else None


@pytest.mark.ci  # compiles the kernels with sanitizers, and they are slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
def test_kernels_read_and_write_only_what_is_theirs():
    settings = {"ASAN_OPTIONS": "detect_leaks=0"}
    run_under(MEMORY, ["libasan.so", "libubsan.so"], settings, *FILES, DECODER / "test_fused.py")


@pytest.mark.ci
@pytest.mark.timeout(900)
@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
def test_threads_wait_for_what_others_write():
    settings = {"TSAN_OPTIONS": "halt_on_error=1 ignore_noninstrumented_modules=1"}
    run_under(THREADS, ["libtsan.so"], settings, DECODER / "test_late_threads.py")
