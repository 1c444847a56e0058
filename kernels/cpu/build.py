"""Compiling the C++ kernels: when the package is installed, or at first use into a cache.

One translation unit for each instruction set and one that chooses among them at run time; no torch
headers, so that all of it takes seconds. What is built depends on the sources, the compiler and the
flags alone, never on the processor that builds it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
FLAGS = (
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -fno-exceptions -fno-rtti -ffp-contract=off "
    "-fno-math-errno -fno-trapping-math -Wall -Wextra -Wno-maybe-uninitialized "
    "-Wno-psabi -Wno-unused-function"
).split()
_X86: dict[str, list[str]] = {
    "isa_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "isa_avx512": [
        *["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"],
        *["-mfma", "-mf16c"],
    ],
}


class CompilerError(Exception):
    """There is no compiler, or it failed; the message says which, and what it printed."""


def units() -> dict[str, list[str]]:
    """Translation units, by name, with the flags that are their own on this machine."""
    x86 = _X86 if platform.machine().lower() in ("x86_64", "amd64") else {}
    return {"main": [], "decoder": [], "isa_portable": ["-O2"], **x86}


def fingerprint() -> str:
    """SHA-256, shortened, of all sources and flags: names what `build` makes."""
    digest = hashlib.sha256(repr((FLAGS, units())).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def library_name() -> str:
    """File name of the compiled kernels of these sources."""
    return f"ptq_cpu_{fingerprint()}.so"


def compiler() -> str:
    """The C++ compiler: `CXX` of the environment, or the first that is found.

    Raises:
        CompilerError: there is none.
    """
    named = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name]
    found = next((path for path in map(shutil.which, named) if path), None)
    if found is None:
        raise CompilerError(f"no C++ compiler; looked for {', '.join(named)}. Install g++")
    return found


def build(folder: Path, extra: tuple[str, ...] = ()) -> Path:
    """Compile the kernels into a folder if they are missing; several processes may do so at once.

    Args:
        folder: Where the library goes; made if it is missing.
        extra: Flags for all units, of sanitizers for instance; they win over a unit's own.

    Returns:
        The library.

    Raises:
        CompilerError: there is no compiler, or it fails.
    """
    target = folder / library_name()
    if target.is_file():
        return target
    program = compiler()
    folder.mkdir(parents=True, exist_ok=True)
    openmp = ["-fopenmp"] if _compiles(program, "-fopenmp") else []
    flags = [*FLAGS, *openmp, *(["-DPTQ_X86"] if "isa_avx2" in units() else [])]
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        objects = {name: Path(temporary) / f"{name}.o" for name in units()}
        commands = [
            [program, *flags, *own, *extra, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(out)]
            for (name, own), out in zip(units().items(), objects.values(), strict=True)
        ]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_run, commands))
        made = Path(temporary) / target.name
        _run([program, *flags, *extra, "-shared", *map(str, objects.values()), "-o", str(made)])
        made.replace(target)
    return target


def _compiles(program: str, flag: str) -> bool:
    command = [program, flag, "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(command, input=b"", capture_output=True, check=False).returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompilerError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    import sys

    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES.parent / "_native"))
