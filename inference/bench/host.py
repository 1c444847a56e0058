"""What the host does in a step of decodes on a GPU, alone: the device gives fixed tokens at once.

All else is as it is: scheduling, the arrays of each step, taking tokens. It runs without a GPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from inference.requests.request import SamplingParams
from inference.scheduling.active import ActiveRequests
from inference.scheduling.active_request import ActiveRequest
from inference.scheduling.blocks import BlockManager, blocks_for
from inference.scheduling.scheduler import Scheduler
from kernels.attention_inputs import KV_BLOCK

if TYPE_CHECKING:
    from inference.gpu.loop import DeviceLoop

WARM_UP, STEPS = 8, 256  # in which every sequence needs a block four times


@dataclass(frozen=True)
class HostStep:
    """The host's part of a step.

    Attributes:
        batch: Requests.
        us: Microseconds of a step of this thread's own time, the mean of many.
    """

    batch: int
    us: float

    @property
    def us_per_sequence(self) -> float:
        """Microseconds a sequence."""
        return self.us / self.batch


def make_loop(batch: int, context: int, *, staggered: bool = True) -> DeviceLoop:
    """A loop whose requests have so many tokens in the cache, and whose device gives token 1.

    Args:
        batch: Requests.
        context: Tokens of each.
        staggered: Some have up to 63 more, so that in each step one in 64 needs a block.
    """
    from inference.gpu.loop import DeviceLoop  # needs Triton
    from inference.gpu.runner import Executed, GpuRunner

    longest = context + KV_BLOCK + WARM_UP + STEPS + 2
    model: Any = SimpleNamespace(layers=[])
    scheduler = Scheduler(BlockManager(batch * blocks_for(longest)), batch, batch)
    requests = ActiveRequests(scheduler, lambda changes: None)
    width = blocks_for(longest)
    runner = GpuRunner(model, [], torch.device("cpu"), scheduler.batch, width=width)
    tokens = torch.ones(2 * batch, dtype=torch.int64)
    runner.execute = lambda plan: Executed(None, tokens, None)
    params = SamplingParams(max_tokens=longest, ignore_eos=True)
    for i in range(batch):
        prompt = [5] * (context + i % KV_BLOCK * staggered)
        request = ActiveRequest(f"request-{i}", prompt, params, None, frozenset({2}), 10**6)
        requests.add(request)
        assert scheduler.assume_computed(request.sequence)
    return DeviceLoop(runner, scheduler, requests)


def measure_host(batch: int, context: int) -> HostStep:
    """Time steps of decodes."""
    loop = make_loop(batch, context)
    for _ in range(WARM_UP):
        loop.step()
    start = time.thread_time()
    for _ in range(STEPS):
        assert len(loop.step().names) == batch
    return HostStep(batch, 1e6 * (time.thread_time() - start) / STEPS)
