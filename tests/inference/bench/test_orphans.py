"""Processes that are started for a measurement end when whoever started them is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PEER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from inference.bench.peers.process import PeerProcess

with PeerProcess(sys.executable, Path({worker!r}), {{"adapter": {worker!r}}}, Path({log!r})) as peer:
    peer.tell({{"a": "question"}})
    time.sleep(100)
"""
WORKER = """
import os, subprocess, sys, time

def do(job, adapter, questions, send):
    told = [*job, next(questions), sys.stdin.read()]
    child = subprocess.Popen(["sleep", "100"])
    with open({pids!r}, "w") as file:
        file.write(f"{{told}}\\n{{os.getpid()}} {{child.pid}}\\n")
    time.sleep(100)
"""
ENGINE = """
import os, sys, time
sys.path.insert(0, {root!r})
from inference.bench.requests import EngineProcess

class Busy:
    path, fake = "a model", None

    def load(self):
        with open({pids!r}, "w") as file:
            file.write(f"\\n{{os.getpid()}}\\n")
        time.sleep(100)

if __name__ == "__main__":
    with EngineProcess(Busy()):
        time.sleep(100)
"""


def wait_for(condition) -> bool:
    for _ in range(2400):
        if condition():
            return True
        time.sleep(0.05)
    return False


def runs(pid: str) -> bool:
    stat = Path("/proc", pid, "stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads processes from /proc")
@pytest.mark.parametrize(
    ("parent", "told"), [(PEER, "['adapter', {'a': 'question'}, '']"), (ENGINE, "")]
)
def test_what_a_killed_command_has_started_ends(parent, told, tmp_path):
    pids, worker, script = tmp_path / "pids", tmp_path / "worker.py", tmp_path / "parent.py"
    worker.write_text(WORKER.format(pids=str(pids)))
    paths = {"root": ROOT, "worker": worker, "pids": pids, "log": tmp_path / "log"}
    script.write_text(parent.format(**{name: str(path) for name, path in paths.items()}))
    process = subprocess.Popen([sys.executable, str(script)])
    try:
        assert wait_for(lambda: pids.exists() and pids.read_text().endswith("\n"))
        said, started = pids.read_text().splitlines()
        assert said == told
        time.sleep(0.2)
        assert all(map(runs, started.split()))
    finally:
        process.kill()
        process.wait()
    assert wait_for(lambda: not any(map(runs, started.split()))), "still running"
