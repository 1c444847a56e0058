"""The engine's steps where tokens are chosen on the host; `inference.gpu.loop` is its twin."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from inference.cpu.batch import Batch, plan_step
from inference.requests.step_result import StepResult
from inference.scheduling.active import ActiveRequests
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.work import Work


class HostLoop:
    """Steps of an engine: each is computed, and its tokens are told, before the next.

    Args:
        forward: Runs the tokens of a step: logits fp32 [R, vocabulary] of the rows wanted.
        scheduler: Says what they are.
        requests: Those that live.
    """

    def __init__(
        self, forward: Callable[[Batch], Tensor], scheduler: Scheduler, requests: ActiveRequests
    ) -> None:
        self.forward, self._scheduler, self._requests = forward, scheduler, requests

    def step(self) -> StepResult:
        """Run a step and tell its tokens."""
        start = time.perf_counter()
        work = self._scheduler.schedule()
        if not len(work):
            return StepResult()
        self._requests.prepare_cache()
        logits = self._computed(work)
        self._scheduler.advance(work)
        which = np.flatnonzero(work.rows)
        result = StepResult()
        if len(which):
            result = self._requests.take_logits(work, which, logits)
        self._scheduler.note_time(work, time.perf_counter() - start)
        return result

    def _computed(self, work: Work) -> Tensor:
        """Logits of a step, whose hidden states go to who drafts, if it reads any."""
        batch, drafter = plan_step(work), self._scheduler.drafter
        wanted = None if drafter is None else drafter.reads
        if drafter is None or wanted is None:
            return self.forward(batch)
        hidden = torch.empty(work.tokens, len(wanted.blocks), wanted.size, dtype=wanted.dtype)
        logits = self.forward(replace(batch, taps=torch.tensor(wanted.blocks), hidden=hidden))
        wanted.keep(hidden, batch.slots)
        drafter.note_hidden(work)
        return logits

    def score(self, work: Work) -> Tensor:
        """Logits of the tokens of a sequence that is run apart, fp32 [tokens, vocabulary]."""
        return self.forward(plan_step(work))

    def warm_up(self) -> None:
        """Nothing is compiled when it is needed."""

    def settle(self) -> StepResult:
        """Nothing: no step is on its way between two."""
        return StepResult()

    def drop(self) -> None:
        """No step is on its way between two."""
