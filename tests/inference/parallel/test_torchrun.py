"""Ranks that torchrun starts, and what is said where it started others than were asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from formats.errors import EngineError, RequestError
from inference.config import EngineConfig
from inference.engine import Engine
from inference.parallel import torchrun
from inference.server.command import main as serve

ROOT = Path(__file__).resolve().parents[3]


def test_the_place_of_a_process():
    told = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4"}
    assert torchrun.place(told) == (1, 4)
    assert torchrun.place({"RANK": "1", "WORLD_SIZE": "4"}) is None


def test_another_number_of_processes_is_refused(tiny_llama, monkeypatch):
    monkeypatch.setattr(torchrun, "place", lambda: (0, 4))
    with pytest.raises(EngineError, match="torchrun has started 4 processes.*--nproc-per-node 2"):
        Engine.from_pretrained(tiny_llama, config=EngineConfig(tensor_parallel=2))


def test_a_server_starts_its_ranks_itself(tiny_llama, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(RequestError, match="Leave torchrun out"):
        serve([str(tiny_llama), "--tensor-parallel", "2"])


@pytest.mark.ci
def test_torchrun_starts_ranks(tiny_llama):
    words = ["ptq", "predict", str(tiny_llama), "--prompt", "def", "--max-tokens", "8", "--quiet"]
    alone = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True)
    words = ["torch.distributed.run", "--nproc-per-node", "2", "-m", *words]
    words += ["--tensor-parallel", "2"]
    both = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True)
    assert both.returncode == 0, both.stderr
    assert both.stdout == alone.stdout
    assert alone.stdout
