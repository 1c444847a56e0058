"""The engine's steps where tokens are chosen on the host; `inference.gpu.loop` is its twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from inference.cpu.batch import Batch, plan_step
from inference.scheduling.active import ActiveRequests
from inference.scheduling.request import RequestOutput
from inference.scheduling.scheduler import Scheduler, Slice


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

    def step(self) -> list[RequestOutput]:
        """Run a step and tell its tokens."""
        slices = self._scheduler.schedule()
        if not slices:
            return []
        names = [part.sequence.name for part in slices]
        self._requests.prepare_cache()
        whole = {name for name in names if self._requests[name].wants_prompt_logits}
        logits = self._run(slices, whole)
        self._scheduler.advance(slices)
        outputs = []
        for part, rows in zip(slices, logits, strict=True):
            if len(rows):
                outputs += self._requests.take_logits(part, rows)
        return outputs

    def score(self, part: Slice) -> Tensor:
        """Logits of the tokens of a slice, fp32 [tokens, vocabulary]."""
        return self._run([part], {part.sequence.name})[0]

    def warm_up(self) -> None:
        """Nothing is compiled when it is needed."""

    def drop(self) -> None:
        """No step is on its way between two."""

    def _run(self, slices: Sequence[Slice], whole: set[str]) -> Sequence[Tensor]:
        """Logits [rows, vocabulary] of each slice."""
        batch, counts = plan_step(slices, self._scheduler.blocks, whole)
        return self.forward(batch).split(counts)
