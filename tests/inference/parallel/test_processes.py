"""Ranks as processes: they start, fail, stop and end, and none is left behind."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from threading import Timer

import pytest

from formats.checkpoint.read import Checkpoint
from formats.errors import EngineEndedError
from formats.tokenizer import load_tokenizer
from inference.config import EngineConfig
from inference.cpu.backend import CpuBackend
from inference.engine import Engine
from inference.parallel.backend import FirstBackend
from inference.parallel.ranks import RankProcess
from inference.requests.request import SamplingParams
from tests.inference.bench.test_orphans import runs, wait_for
from tests.inference.parallel.thread_ranks import cpu_backend

ROOT = Path(__file__).resolve().parents[3]
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
FIRST = """
import time
from inference.config import EngineConfig
from inference.parallel.group import Progress
from inference.parallel.messages import RankSpec
from inference.parallel.ranks import Ranks

spec = RankSpec(1, 2, dict, EngineConfig(), dict, {meeting!r}, 1, dict)
ranks = Ranks([spec], Progress())
while ranks._others[0].beat.doing != "meeting the other ranks":
    time.sleep(0.1)
print(ranks.members[0].pid, flush=True)
time.sleep(100)
"""


def start(path, **sizes) -> Engine:
    config = EngineConfig(tensor_parallel=2, **sizes)
    return Engine.from_pretrained(path, config=config)


def processes(engine) -> list[RankProcess]:
    return engine.backend.ranks.members


def gone(pids) -> bool:
    return wait_for(lambda: not any(runs(str(pid)) for pid in pids))


def test_processes_answer_and_end(tiny_llama, make_quantized):
    path = make_quantized(tiny_llama, "a8w8c8")
    engine, one = start(path), Engine.from_pretrained(path)
    pids = [process.pid for process in processes(engine)]
    prompts = [[5, 9, 200], [11, 4]]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=8))
    wanted = one.generate(prompts, SamplingParams(max_tokens=8))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
    assert all(runs(str(pid)) for pid in pids)
    engine.close()
    assert gone(pids)
    with pytest.raises(EngineEndedError, match="ranks have been ended; make a new engine"):
        engine.generate(prompts)


@pytest.mark.parametrize(
    ("sent", "told", "within"),
    [
        (signal.SIGKILL, "died with exit code -9; .* while running (a )?step", 3.0),
        (signal.SIGSTOP, "has stopped while running (a )?step .* waited for it for \\d+ s", 20.0),
    ],
)
def test_a_rank_that_dies_or_stops_ends_the_engine(sent, told, within, tiny_llama):
    engine = start(tiny_llama, rank_patience_s=2.0)
    (process,) = processes(engine)
    at = []

    def send():
        at.append(time.monotonic())
        os.kill(process.pid, sent)

    Timer(0.2 + random.random() / 4, send).start()
    with pytest.raises(EngineEndedError, match=rf"rank 1 \(process {process.pid}\) of 2 {told}"):
        engine.generate([[5, 6, 7]] * 40, LONG)
    assert time.monotonic() - at[0] < within
    assert gone([process.pid])
    with pytest.raises(EngineEndedError, match=f"process {process.pid}"):
        engine.generate([[5, 6, 7]])


def test_a_rank_that_dies_before_it_has_met_the_others(tiny_llama):
    checkpoint, config = Checkpoint.open(tiny_llama), EngineConfig(tensor_parallel=2)

    def killed(*args):
        process = RankProcess(*args)
        process.kill()
        return process

    backend = FirstBackend(
        CpuBackend(), partial(Checkpoint.open, tiny_llama), config, cpu_backend, start=killed
    )
    with pytest.raises(EngineEndedError, match="of 2 died with exit code -9; .* while starting"):
        Engine(checkpoint, load_tokenizer(tiny_llama), config, backend)


def test_a_rank_that_cannot_load_ends_the_engine(tiny_llama):
    checkpoint, config = Checkpoint.open(tiny_llama), EngineConfig(tensor_parallel=2)
    broken = partial(Checkpoint.open, tiny_llama / "nowhere")
    started = []

    def noted(*args):
        started.append(RankProcess(*args))
        return started[-1]

    backend = FirstBackend(CpuBackend(), broken, config, cpu_backend, start=noted)
    told = re.escape("of 2 failed while loading its part of the model: ") + ".*nowhere"
    with pytest.raises(EngineEndedError, match=told):
        Engine(checkpoint, load_tokenizer(tiny_llama), config, backend)
    assert len(started) == 1
    assert gone([started[0].pid])


def test_ranks_end_with_the_first(tmp_path):
    """Killed while they wait for it, which they would do for long."""
    program = [sys.executable, "-c", FIRST.format(meeting=str(tmp_path / "meeting"))]
    first = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert first.stdout is not None
        pid = first.stdout.readline().strip()
        assert runs(pid)
    finally:
        first.kill()
        first.wait()
    assert gone([pid])
