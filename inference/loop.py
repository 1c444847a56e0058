"""The engine's steps where tokens are chosen on the host; `inference.gpu.loop` is its twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from inference.config import EngineConfig
from inference.cpu.runner import run_slices
from inference.models.decoder import LlamaModel
from inference.scheduling.active import ActiveRequests
from inference.scheduling.request import RequestOutput
from inference.scheduling.scheduler import Scheduler, Slice
from kernels.attention_inputs import KVPool

if TYPE_CHECKING:
    from inference.gpu.loop import DeviceLoop


class HostLoop:
    """Steps of an engine: each is computed, and its tokens are told, before the next.

    Args:
        model: Runs them.
        pools: Its cache.
        scheduler: Says what they are.
        requests: Those that live.
    """

    def __init__(
        self,
        model: LlamaModel,
        pools: Sequence[KVPool],
        scheduler: Scheduler,
        requests: ActiveRequests,
    ) -> None:
        self._model, self._pools = model, pools
        self._scheduler, self._requests = scheduler, requests

    def step(self) -> list[RequestOutput]:
        """Run a step and tell its tokens."""
        slices = self._scheduler.schedule()
        if not slices:
            return []
        names = [part.sequence.name for part in slices]
        whole = {name for name in names if self._requests[name].wants_prompt_logits}
        logits = self._run(slices, whole)
        self._scheduler.advance(slices)
        outputs = []
        for part in slices:
            rows = logits.get(part.sequence.name)
            if rows is not None:
                outputs += self._requests.take_logits(part, rows)
        return outputs

    def score(self, part: Slice) -> Tensor:
        """Logits of the tokens of a slice, fp32 [tokens, vocabulary]."""
        name = part.sequence.name
        return self._run([part], {name})[name]

    def warm_up(self) -> None:
        """Nothing is compiled when it is needed."""

    def drop(self) -> None:
        """No step is on its way between two."""

    def _run(self, slices: list[Slice], whole: set[str]) -> dict[str, Tensor]:
        return run_slices(self._model, self._pools, slices, self._scheduler.blocks, whole)


def make_loop(
    model: LlamaModel,
    pools: Sequence[KVPool],
    scheduler: Scheduler,
    config: EngineConfig,
    requests: ActiveRequests,
) -> HostLoop | DeviceLoop:
    """The loop of an engine, on a GPU where its model runs there; arguments as in `HostLoop`."""
    if not model.place.triton:
        return HostLoop(model, pools, scheduler, requests)
    from inference.gpu.loop import make_device_loop  # needs Triton

    return make_device_loop(model, pools, scheduler, config, requests)
