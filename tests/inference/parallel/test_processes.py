"""Ranks start, fail, stop and end, and none is left: processes, those of torchrun, and doubles."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from threading import Event, Thread, Timer

import pytest

from formats.checkpoint.read import Checkpoint
from formats.errors import EngineEndedError, EngineError, RequestError
from formats.tokenizer import load_tokenizer
from inference.config import EngineConfig
from inference.cpu.backend import CpuBackend
from inference.engine import Engine
from inference.parallel import backend, worker
from inference.parallel.backend import FirstBackend
from inference.parallel.communication import Heartbeat, Progress, RankSpec
from inference.parallel.ranks import RankProcess, Ranks
from inference.requests.request import SamplingParams
from inference.server.command import main as serve
from tests.inference.bench.test_orphans import runs, wait_for
from tests.inference.engines import engine_of
from tests.inference.parallel.thread_ranks import cpu_backend

ROOT = Path(__file__).resolve().parents[3]
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
FIRST = """
import time
from inference.config import EngineConfig
from inference.parallel.communication import Progress
from inference.parallel.communication import RankSpec
from inference.parallel.ranks import Ranks

spec = RankSpec(1, 2, dict, EngineConfig(), dict, {meeting!r}, 1, dict)
ranks = Ranks([spec], Progress())
while ranks._others[0].beat.doing != "meeting the other ranks":
    time.sleep(0.1)
print(ranks.members[0].pid, flush=True)
time.sleep(100)
"""


def start(path, **sizes) -> Engine:
    return engine_of(path, tensor_parallel=2, **sizes)


def starting(path, loaded, begin) -> Engine:
    """An engine whose second rank loads its part from there, in a process that is begun so."""
    config = EngineConfig(tensor_parallel=2)
    opened = partial(Checkpoint.open, loaded)
    backend = FirstBackend(CpuBackend(), opened, config, cpu_backend, start=begin)
    return Engine(Checkpoint.open(path), load_tokenizer(path), config, backend)


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
    ("sent", "told", "patience"),
    [
        # with such patience only its end shows soon that it has died
        (signal.SIGKILL, "died with exit code -9 .*ran out.* while running (a )?step", 120.0),
        pytest.param(
            *(
                signal.SIGSTOP,
                "has stopped while running (a )?step .* waited for it for \\d+ s",
                2.0,
            ),
            marks=pytest.mark.ci,  # waits that long
        ),
    ],
)
def test_a_rank_that_dies_or_stops_ends_the_engine(sent, told, patience, tiny_llama):
    engine = start(tiny_llama, rank_patience_s=patience)
    (process,) = processes(engine)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))  # rank 1 has loaded its part
    Timer(0.2 + random.random() / 4, partial(os.kill, process.pid, sent)).start()
    with pytest.raises(EngineEndedError, match=rf"rank 1 \(process {process.pid}\) of 2 {told}"):
        engine.generate([[5, 6, 7]] * 40, LONG)
    assert gone([process.pid])
    with pytest.raises(EngineEndedError, match=f"process {process.pid}"):
        engine.generate([[5, 6, 7]])


def test_a_rank_that_dies_before_it_has_met_the_others(tiny_llama):
    def killed(*args):
        process = RankProcess(*args)
        process.kill()
        return process

    with pytest.raises(EngineEndedError, match="of 2 died with exit code -9 .* while starting"):
        starting(tiny_llama, tiny_llama, killed)


def test_a_rank_that_cannot_load_ends_the_engine(tiny_llama):
    started = []

    def noted(*args):
        started.append(RankProcess(*args))
        return started[-1]

    told = re.escape("of 2 failed while loading its part of the model: ") + ".*nowhere"
    with pytest.raises(EngineEndedError, match=told):
        starting(tiny_llama, tiny_llama / "nowhere", noted)
    assert len(started) == 1
    assert gone([started[0].pid])


def test_ranks_end_with_the_first(tmp_path):
    """Killed while they wait for it, which they would do for long."""
    program = [sys.executable, "-c", FIRST.format(meeting=str(tmp_path / "meeting"))]
    first = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        pid = first.stdout.readline().strip()
        assert runs(pid)
    finally:
        first.kill()
        first.wait()
    assert gone([pid])


class Answering:
    """A rank that says where it is, and does nothing; see `inference.parallel.ranks.Member`."""

    def __init__(self, rank, tasks, news):
        self.name, self._over = f"rank {rank} (alone)", Event()
        self._ends = tasks, news
        news.send(Heartbeat(0, "running step 7"))

    def kill(self):
        self._over.set()

    def ended(self, seconds):
        for end in self._ends:
            end.close()
        return "ended"


class Held:
    """What is called before ranks end, and after a failure."""

    def __init__(self, ranks):
        self.calls = []
        ranks.before_end(self.release)
        ranks.on_failure(self.give_up)

    def release(self):
        self.calls.append("release")

    def give_up(self):
        self.calls.append("give up")


@pytest.fixture
def ranks(request):
    progress, patience = Progress(), getattr(request, "param", 120.0)
    specs = [RankSpec(1, 2, dict, EngineConfig(), dict, "", 1, dict)]
    made = Ranks(specs, progress, Answering, patience)
    made.progress = progress
    yield made
    made.close()


def test_a_device_that_does_not_come_back_is_named_with_every_rank_and_its_step(ranks):
    """Ranks are at the same number: none is later than another, and nothing else would end this."""
    held, start = Held(ranks), time.monotonic()
    with ranks.together("running step 8"), ranks.progress.waiting(0.3):
        assert ranks._failed.wait(120)
    assert time.monotonic() - start >= 0.3
    message = (
        r"rank 0 of 2 has waited too long for its GPU while running step 8: .* does not end\. "
        r"rank 1 \(alone\) of 2 is running step 7\."
    )
    with pytest.raises(EngineEndedError, match=message):
        ranks.check()
    assert held.calls == ["give up"]


@pytest.mark.parametrize("ranks", [0.5], indirect=True)
def test_a_rank_that_stopped_amid_a_collective_that_all_have_counted_is_found(ranks):
    """It has counted it like the others, so that none is later than another; but it is silent."""
    time.sleep(1.0)
    ranks.check()  # nobody waits for it
    with ranks.together("running step 8"):
        assert ranks._failed.wait(120)
    told = r"rank 1 \(alone\) of 2 has stopped while running step 7: the others have waited for it"
    with pytest.raises(EngineEndedError, match=told):
        ranks.check()


def test_a_device_that_comes_back_in_time_is_no_failure(ranks):
    held = Held(ranks)
    with ranks.progress.waiting(1.0):
        time.sleep(0.1)
    time.sleep(1.2)
    ranks.check()
    assert held.calls == []
    ranks.close()
    assert held.calls == ["release"], "graphs go before what connects the ranks"


def test_what_is_gone_is_not_called(ranks):
    Thread(target=Held, args=(ranks,)).run()
    ranks.close()
    with pytest.raises(EngineEndedError, match="have been ended"):
        ranks.check()


def test_the_place_of_a_process():
    told = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4"}
    assert worker.torchrun_place(told) == (1, 4)
    assert worker.torchrun_place({"RANK": "1", "WORLD_SIZE": "4"}) is None


def test_another_number_of_processes_is_refused(tiny_llama, monkeypatch):
    monkeypatch.setattr(backend, "torchrun_place", lambda: (0, 4))
    with pytest.raises(EngineError, match="torchrun has started 4 processes.*--nproc-per-node 2"):
        start(tiny_llama)


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
