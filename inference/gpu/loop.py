"""The engine's steps where tokens are chosen on the device.

    launch step n + 1  ->  wait for step n  ->  tell its tokens

The device is given the next step before the host knows the tokens of the last one, so that it never
waits for the host. A sequence that turns out to have ended has then one row too many on its way; it
is dropped when it arrives. Whenever the next step depends on more than where tokens go (a request
waits for a place, blocks run short, a request's next token is chosen on the host), the step on its
way is waited for first.
"""

from __future__ import annotations

import time

from torch import Tensor

from inference.gpu.runner import GpuRunner, Launched
from inference.gpu.sizes import Draw, ScheduledSlice
from inference.scheduling.active import ActiveRequest, ActiveRequests
from inference.scheduling.request import RequestOutput
from inference.scheduling.scheduler import Scheduler, Slice


class DeviceLoop:
    """Steps of an engine.

    Args:
        runner: Runs them.
        scheduler: Says what they are.
        requests: Those that live.
        ahead: Launch steps before the tokens of the last are known.

    Attributes:
        runner: Runs them.
        waited: Seconds for which the host has waited for the device.
    """

    def __init__(
        self,
        runner: GpuRunner,
        scheduler: Scheduler,
        requests: ActiveRequests,
        *,
        ahead: bool = True,
    ) -> None:
        self.runner, self._scheduler, self._requests = runner, scheduler, requests
        self._ahead, self.waited = ahead, 0.0
        self._indices: dict[str, int] = {}
        self._on_its_way: tuple[Launched, dict[str, ActiveRequest]] | None = None

    def step(self) -> list[RequestOutput]:
        """Launch a step, and tell the tokens of the one before it."""
        outputs = [] if self._may_run_ahead() else self.collect()
        slices = self._scheduler.schedule()
        if not slices:
            return outputs + self.collect()
        launched = self._launch(slices)
        outputs += self.collect()
        self._on_its_way = launched
        return outputs if self._may_run_ahead() else outputs + self.collect()

    def collect(self) -> list[RequestOutput]:
        """Wait for the step on its way and tell its tokens."""
        on_its_way, self._on_its_way = self._on_its_way, None
        if on_its_way is None:
            return []
        launched, requests = on_its_way
        outputs: list[RequestOutput] = []
        start = time.perf_counter()
        tokens = launched.tokens()
        self.waited += time.perf_counter() - start
        for index, (work, token) in enumerate(zip(launched.work, tokens, strict=True)):
            request = requests[work.part.sequence.name]
            if self._requests.get(work.part.sequence.name) is not request:
                continue  # it has ended since
            if not request.chosen_on_device:
                if work.rows:
                    outputs += self._requests.take_logits(work.part, launched.logits_of(index))
            elif token is not None:
                outputs.append(self._requests.take_token(request, token))
        return outputs

    def score(self, part: Slice) -> Tensor:
        """Logits of the tokens of a slice, fp32 [tokens, vocabulary], on the host."""
        return self.runner.score(part)

    def warm_up(self) -> None:
        """Compile and capture the steps of decodes alone and of prompts alone.

        Raises:
            EngineError: memory is too small for them.
        """
        scheduler = self._scheduler
        self.runner.warm_up(scheduler.max_batch_size, scheduler.max_batched_tokens)

    def drop(self) -> None:
        """Forget the step on its way."""
        self._on_its_way = None

    def _may_run_ahead(self) -> bool:
        """Whether the next step is known without the tokens of the last, but for their ids."""
        scheduler, running = self._scheduler, self._scheduler.running
        full = len(running) >= scheduler.max_batch_size
        if not self._ahead or (scheduler.waiting and not full):
            return False
        missing = sum(scheduler.blocks.missing(s.name, len(s.tokens)) for s in running)
        on_device = all(self._requests[s.name].chosen_on_device for s in running)
        return missing <= scheduler.blocks.available and on_device

    def _launch(self, slices: list[Slice]) -> tuple[Launched, dict[str, ActiveRequest]]:
        self._requests.prepare_cache()
        self._assign_indices()
        requests, work = {}, []
        for part in slices:
            name = part.sequence.name
            request = requests[name] = self._requests[name]
            own = ScheduledSlice(
                part,
                samples=part.samples,
                index=self._indices[name],
                draw=Draw(*request.draw),
                logits=not request.chosen_on_device,
                whole=request.wants_prompt_logits,
            )
            work.append(own)
        launched = self.runner.launch(work)
        self._scheduler.advance(slices)
        for own in work:
            request = requests[own.part.sequence.name]
            if own.samples and request.chosen_on_device:
                request.expect()
        return launched, requests

    def _assign_indices(self) -> None:
        """A batch index for each running sequence; those of others are free again."""
        running = [sequence.name for sequence in self._scheduler.running]
        kept = {name: self._indices[name] for name in running if name in self._indices}
        free = iter(sorted(set(range(self._scheduler.max_batch_size)) - set(kept.values())))
        self._indices = kept | {name: next(free) for name in running if name not in kept}
