"""Both implementations of the ops, and numbers that every test draws alike."""

import pytest
import torch

from kernels.cpu import native


@pytest.fixture(autouse=True)
def drawn_alike() -> None:
    """Random numbers of a test do not depend on those before it."""
    torch.manual_seed(0)


def without_library(request, monkeypatch) -> None:
    """Let the ops run as if there were no compiled kernels."""
    if request.config.getoption("--native-library"):
        pytest.skip("the given library is what is tested")
    monkeypatch.setattr(native, "library", lambda: None)


@pytest.fixture(params=["compiled", "torch"])
def backend(request, monkeypatch):
    """The ops run on the compiled kernels, then as if there were none."""
    if request.param == "torch":
        without_library(request, monkeypatch)
    elif native.library() is None:
        pytest.skip("no C++ compiler, and no compiled kernels")
    return request.param


@pytest.fixture(params=native.supported())
def isa(request):
    """Runs a test on one instruction set."""
    with native.forced(request.param):
        yield request.param


@pytest.fixture(params=[*native.supported(), "torch"])
def every_backend(request, monkeypatch):
    """The ops run on each instruction set, then as if there were no compiled kernels."""
    if request.param == "torch":
        without_library(request, monkeypatch)
        yield
    else:
        with native.forced(request.param):
            yield
