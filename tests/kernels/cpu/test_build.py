"""The compiled kernels: built once, found again, and done without where there is no compiler."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build, native

HAS_COMPILER = any(map(shutil.which, ("g++", "clang++", "c++")))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """A stand-in for the kernels' sources that compiles at once: functions that return 1."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in build.units():
        (folder / f"{name}.cpp").write_text("")
    public = 'extern "C" __attribute__((visibility("default"))) int'
    functions = (f"{public} {name}() {{ return 1; }}\n" for name in native._SIGNATURES)
    (folder / "main.cpp").write_text("".join(functions))
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


@pytest.fixture
def nowhere(monkeypatch, tmp_path, sources):
    """No library in the package and an empty cache; `native.library` looks again."""
    monkeypatch.delenv("PTQ_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "packaged_folder", lambda: tmp_path / "package")
    native.library.cache_clear()
    yield tmp_path / "ptq"
    native.library.cache_clear()


@needs_compiler
def test_compiles_at_first_use_into_the_cache(nowhere, caplog):
    loaded = native.library()
    assert loaded is not None
    assert [path.name for path in nowhere.iterdir()] == [build.library_name()]
    assert "compiling" in caplog.text  # at a level that is printed: it takes long
    native.library.cache_clear()
    caplog.clear()
    assert native.library() is not None
    assert caplog.text == ""


def test_without_a_compiler_one_warning_says_so(nowhere, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert native.library() is None
    assert native.library() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no C++ compiler; looked for g++" in record.getMessage()
    assert not nowhere.exists()


def test_a_compiler_that_fails_is_quoted(nowhere, monkeypatch, tmp_path, caplog):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert native.library() is None
    assert "out of order" in caplog.text


@needs_compiler
def test_the_cache_of_everything_else_is_that_of_the_library(nowhere, monkeypatch, tmp_path):
    monkeypatch.setenv("PTQ_CACHE", str(tmp_path / "all"))
    assert native.library() is not None
    assert [path.name for path in (tmp_path / "all").iterdir()] == [build.library_name()]


@needs_compiler
@pytest.mark.parametrize("home", ["none", "no folder"])
def test_without_a_place_for_the_library_one_warning_tells_how_to_give_one(
    nowhere, monkeypatch, tmp_path, caplog, home
):
    monkeypatch.delenv("XDG_CACHE_HOME")
    if home == "none":  # a container's user without a name
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 54321)
    else:
        monkeypatch.setenv("HOME", os.devnull)
    assert native.library() is None
    assert caplog.records[-1].getMessage().count("PTQ_CACHE") == 1


@needs_compiler
def test_several_processes_may_build_at_once(tmp_path, sources):
    code = "import sys; from pathlib import Path; from kernels.cpu import build; "
    code += f"build.SOURCES = Path({str(sources)!r}); print(build.build(Path(sys.argv[1])))"
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", code, str(tmp_path / "library")]
    environment = os.environ | {"PYTHONPATH": str(root)}
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = {process.communicate()[0].strip() for process in started}
    (path,) = paths
    assert os.listdir(tmp_path / "library") == [Path(path).name]
    assert native.open_library(Path(path)).ptq_supports(0) == 1


def test_the_name_follows_the_sources(monkeypatch, tmp_path):
    copy = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, copy)
    monkeypatch.setattr(build, "SOURCES", copy)
    before = build.library_name()
    with (copy / "simd.h").open("a") as file:
        file.write("// changed\n")
    assert build.library_name() != before


@needs_compiler
def test_a_weight_runs_on_the_instruction_set_that_packed_it():
    import torch

    q = torch.ones(4, 8, dtype=torch.int8)
    with native.forced("portable"):
        packed = native.pack(q, "int8", torch.ones(4, 1))
        assert native.linear(q, packed, torch.tensor(1.0)).tolist() == [[8.0] * 4] * 4
    if native.isa() != "portable":
        with pytest.raises(ValueError, match="packed for another instruction set than"):
            native.linear(q, packed, torch.tensor(1.0))
    with pytest.raises(ValueError, match="'sse9' does not run here"), native.forced("sse9"):
        pass
