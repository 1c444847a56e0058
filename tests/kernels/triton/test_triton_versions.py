"""Tritons from the oldest to the newest: kernels compile, and what one refuses has a plain twin."""

import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import triton
from triton.errors import TritonError

from kernels.triton import versions
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.common import Workspace
from kernels.triton.linear.w8a8 import pack_w8a8
from kernels.triton.linear.weight_only import pack_w4a16
from kernels.triton.tuning import KVSplit, PrefillTile, Tile
from tests.kernels.fetched import fetched
from tests.kernels.triton.test_triton_compiled import make_inputs, make_pool
from tests.kernels.triton_lab import building_for, compiled

ROOT = Path(__file__).parents[3]
OLDEST, NEWEST = "3.6.0", "3.9.0"


@pytest.mark.ci  # fetches them
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kernels_compile_under_the_oldest_and_the_newest(version):
    """Those marked: every Gluon kernel, and one of each family of plain ones."""
    if triton.__version__.startswith(version.rpartition(".")[0]):
        pytest.skip("is the one that is installed, which all tests run under")
    path = os.pathsep.join(
        [str(ROOT), str(fetched("triton", version, 190)), os.environ.get("PYTHONPATH", "")]
    )
    arguments = ["-m", "every_triton", "-n", "0", "-p", "no:cacheprovider", "tests/kernels/triton"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "TRITON_DEFAULT_FP_FUSION" not in done.stdout + done.stderr


@contextlib.contextmanager
def newer_triton() -> Iterator[pytest.MonkeyPatch]:
    """A Triton newer than those tested, and that has refused nothing so far."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions.triton, "__version__", "4.1.0")
        patch.setattr(versions, "_refused", set())
        yield patch


@pytest.fixture
def unknown():
    with newer_triton():
        yield versions


def test_what_an_unknown_triton_refuses_is_not_tried_again(unknown):
    tried = []

    def refuse():
        tried.append(1)
        raise TritonError

    with pytest.warns(
        UserWarning, match=r"Triton 4\.1\.0 \(torch 2.*Tested are Triton 3\.6 to 3\.9"
    ):
        assert not unknown.run_gluon("one", refuse)
    with warnings.catch_warnings(action="error"):
        assert not unknown.run_gluon("one", refuse)
        assert not unknown.run_gluon("another", refuse)
        assert unknown.run_gluon("a third", lambda: None)
    assert len(tried) == 2


def test_a_tested_triton_does_not_hide_an_error(unknown, monkeypatch):
    monkeypatch.setattr(unknown.triton, "__version__", "3.9.1")
    with pytest.raises(ZeroDivisionError), warnings.catch_warnings(action="error"):
        unknown.run_gluon("one", lambda: 1 // 0)
    with pytest.raises(AttributeError):
        unknown.run_gluon("one", lambda: torch.no_such_name)


@compiled
def test_attention_falls_back_to_the_plain_kernels():
    q, workspace = torch.zeros(2, 32, 128).bfloat16(), Workspace.on("cpu", 1 << 20, 64)
    inputs = make_inputs(make_pool(torch.int8, 1), torch.arange(3))
    with newer_triton() as patch:
        for module in ("decode_hopper", "prefill_hopper"):
            refuse = mock.Mock(side_effect=TritonError)
            patch.setattr(f"kernels.triton.attention.{module}.launch", refuse)
        with warnings.catch_warnings(record=True) as told, building_for(90) as built:
            warnings.simplefilter("always")
            decode_attention(q, inputs, workspace, split=KVSplit(2, 4))
            prefill_attention(q, inputs, workspace, tile=PrefillTile(128, 64, 4, 0))
    told = [warning for warning in told if "Triton 4.1.0" in str(warning.message)]
    assert len(told) == 1
    assert "decode attention" in str(told[0].message)
    decode, prefill = built
    assert not decode.count("movmatrix")
    assert not prefill.count("setmaxnreg")


@compiled
def test_linear_layers_fall_back_to_the_plain_kernels():
    workspace, many = Workspace.on("cpu", 1 << 20, 64), Tile(128, 128, 1, 4, 8, True)
    q, x = (torch.zeros(n, 1024, dtype=torch.int8) for n in (512, 200))
    eight, four = pack_w8a8(q, torch.ones(512)), pack_w4a16(q, torch.ones(512, 8))
    with newer_triton() as patch:
        for name in ("w4", "w8"):
            patch.setitem(sys.modules, f"kernels.triton.linear.hopper.{name}", None)
        with warnings.catch_warnings(record=True) as told, building_for(90) as built:
            eight.run(x, torch.ones(1), workspace, tile=many)
            four.run(x.half(), None, workspace, tile=many)
            four.run(x.repeat(3, 1).half(), None, workspace, tile=many)  # by the library
    assert sum("Triton 4.1.0" in str(warning.message) for warning in told) == 1
    assert len(built) == 3
    assert all(binary.count("wgmma") and not binary.count("setmaxnreg") for binary in built[:2])
