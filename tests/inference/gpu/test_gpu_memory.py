"""Memory that runs out is told with what is needed, what is there and what to change."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from formats.errors import EngineError
from inference.gpu import execute, memory, runner
from inference.gpu.backend import TritonBackend
from inference.gpu.runner import GpuRunner
from inference.models.kv_cache import CacheShape, LayerCache
from inference.models.model import KVHeads
from inference.scheduling.blocks import BlockManager
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import Sequence

CPU, SECOND = torch.device("cpu"), torch.device("cuda", 1)


def run_out(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture(autouse=True)
def three_gigabytes_are_free(monkeypatch):
    for module in (memory, runner):
        monkeypatch.setattr(module, "free_bytes", lambda device: 3 * 10**9)


def test_weights_that_do_not_fit():
    backend = TritonBackend(SECOND, torch.float16)
    with pytest.raises(EngineError) as caught, backend.loading(5 * 10**9):
        run_out()
    assert str(caught.value) == (
        "cuda:1: memory is too small: loading the weights needs 5.00 GB, 3.00 GB are free; "
        "quantize the model further, or take a GPU with more memory"
    )


def test_other_errors_pass():
    backend = TritonBackend(SECOND, torch.float16)
    with pytest.raises(ZeroDivisionError), backend.loading(1):
        raise ZeroDivisionError


def test_a_cache_that_does_not_fit(monkeypatch):
    shape = CacheShape(100, [LayerCache(KVHeads(2, 128, 128))] * 40)
    pools = TritonBackend(CPU, torch.float16).cache(shape)
    held = sum(pool.k.nbytes + pool.v.nbytes for pool in pools)
    monkeypatch.setattr(CacheShape, "allocate", run_out)
    told = f"a cache of 100 blocks of 64 tokens needs {held / 1e9:.2f} GB, 3.00 .*max_batch_size"
    with pytest.raises(EngineError, match=told):
        TritonBackend(SECOND, torch.float16).cache(shape)


def test_a_step_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(execute, "run_blocks", run_out)
    model: Any = SimpleNamespace(layers=[])
    scheduler = Scheduler(BlockManager(1), max_batch_size=1, max_batched_tokens=1)
    own = GpuRunner(model, [], CPU, scheduler.batch, width=1)
    scheduler.add(Sequence("a", [5]))
    work = scheduler.schedule()
    told = "a step found no more, 3.00 GB are free; lower max_batched_tokens"
    with pytest.raises(EngineError, match=told):
        own.launch(work)
