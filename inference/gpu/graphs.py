"""CUDA graphs: calls that are captured, and which steps of a model are."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from inference.gpu.fields import Fields
from inference.gpu.layers import workspace_on
from inference.gpu.memory import ran_out
from inference.gpu.ranks import StepRanks
from inference.gpu.sizes import Size
from kernels.triton.common import Workspace

TIMED = 3  # replays of a captured step that tell what it takes
Result = TypeVar("Result")
Outputs = tuple[Tensor | None, Tensor | None]  # of a padded step
log = logging.getLogger("ptq.inference")


@dataclass
class Captured(Generic[Result]):
    """A call as a graph: what its last run gave, and the workspace that it writes to."""

    graph: torch.cuda.CUDAGraph
    result: Result
    workspace: Workspace


class Capturer:
    """Captures calls on a GPU. Their graphs share memory, as no two are replayed at once.

    What other threads call does not end a capture, and no garbage is collected during it: what an
    engine that is gone has left, such as pinned memory, is freed by calls that no capture may hold.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def capture(
        self, run: Callable[[], Result], meet: Callable[[], object] = lambda: None
    ) -> Captured[Result]:
        """Run something once, which compiles its kernels, then capture it.

        Args:
            run: Asks nothing of the host.
            meet: Called between both.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                workspace = workspace_on(self._device)
                run()
        finally:  # where memory runs out, the next step has what this one had
            current.wait_stream(self._stream)
        meet()
        if not self._graphs:  # torch has no pool any more whose graphs are all gone
            self._pool = torch.cuda.graph_pool_handle()
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                result = run()
        finally:
            if collects:
                gc.enable()
        self._graphs.add(graph)
        return Captured(graph, result, workspace)


@dataclass
class StepGraph:
    """A padded step as a graph.

    Results are logits and tokens, logits of decodes alone: those of prompts nobody reads, and the
    next graph has their memory. Those of a size that keeps the rows of all tokens are rows and
    their scales.
    """

    fields: Fields
    captured: Captured[Outputs]


class Steps(Protocol):
    """What runs padded steps."""

    def blank(self, size: Size) -> Fields:
        """The arrays of a step that stands for no sequence, on the device."""
        ...

    def run(self, x: Mapping[str, Tensor], size: Size) -> Outputs:
        """Run the kernels of a step whose arrays are there."""
        ...


class StepGraphs:
    """The graphs that padded steps are replayed as, by their sizes.

    Steps of decodes alone are captured when they are first needed, any other when it is needed
    again.

    Args:
        device: The GPU.
        enabled: Whether steps are captured at all.
        may_ask: Whether a step may turn out to ask the host, as transformers' code may.
        ranks: Those that run the same steps; None where there are no others.

    Attributes:
        enabled: Whether steps are captured.
        captured: Those that are.
        short: Sizes for whose graph there was no memory.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        enabled: bool,
        may_ask: bool,
        ranks: StepRanks | None,
    ) -> None:
        self._device, self._ranks = device, ranks
        self.enabled, self._may_ask = enabled, may_ask
        self.captured: dict[Size, StepGraph] = {}
        self.short: set[Size] = set()
        self._seen: set[Size] = set()  # steps of prompts that ran
        self._capturer = Capturer(device) if enabled else None

    def of(self, size: Size, steps: Steps) -> StepGraph | None:
        """The graph that a step is replayed as; None if it runs kernel by kernel.

        Raises:
            RuntimeError: memory is too small for that of decodes.
        """
        if not self.enabled or size in self.short:
            return None
        if size.prompts and size not in self._seen:
            self._seen.add(size)
            return None
        if size in self.captured:
            return self.captured[size]
        if self._must_wait(size, steps):
            return None
        found = None
        try:
            found = self.made(size, steps)
        except RuntimeError as error:
            if not (size.prompts and ran_out(error)):
                raise
            torch.cuda.empty_cache()  # of the attempt
        fits = found is not None
        if size.prompts and self._ranks is not None:  # all replay it, or none does
            fits = self._ranks.agree(fits)
        if fits:
            return found
        self.captured.pop(size, None)
        if not self.short:  # once: other sizes are likely to lack it too
            log.warning(
                "%s: no memory for the CUDA graph of a step of %d tokens of prompts; such steps "
                "run kernel by kernel. A smaller cache (kv_blocks) leaves room",
                self._device,
                size.tokens,
            )
        self.short.add(size)
        return None

    def made(self, size: Size, steps: Steps) -> StepGraph:
        """The graph of a step, whatever there is of it."""
        if size not in self.captured:
            self.captured[size] = self._capture(size, steps)
        return self.captured[size]

    def expect(self, size: Size) -> None:
        """Capture a step when it is asked for next, whether it has been needed before or not."""
        self._seen.add(size)

    def forget(self, *, adapted: bool = False) -> None:
        """Give up all graphs, or those of steps with adapters alone."""
        for size in [size for size in self.captured if size.adapted or not adapted]:
            del self.captured[size]

    def times(self) -> dict[int, float]:
        """Seconds of the captured steps of decodes by their rows, all of which stand for nothing;
        no logprobs where other ranks would have to take part."""
        alone = {} if self._ranks is not None else self.captured
        found = {}
        for size, own in alone.items():
            if size.prompts or size.adapted or size.pieces is not None:
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            own.captured.graph.replay()
            start.record()
            for _ in range(TIMED):
                own.captured.graph.replay()
            end.record()
            end.synchronize()
            found[size.decodes] = start.elapsed_time(end) / 1000 / TIMED
        return found

    def _must_wait(self, size: Size, steps: Steps) -> bool:
        """Whether the model's code asks the host during a step; then no step is captured."""
        if not self._may_ask:
            return False
        x = steps.blank(size).on_device
        steps.run(x, size)  # kernels are compiled before
        self.enabled = not _asks_host(lambda: steps.run(x, size))
        if not self.enabled:
            log.warning(
                "%s: the model's code asks the host during a step, which no CUDA graph holds; "
                "steps run kernel by kernel",
                self._device,
            )
        return not self.enabled

    def _capture(self, size: Size, steps: Steps) -> StepGraph:
        assert self._capturer is not None
        fields = steps.blank(size)
        captured = self._capturer.capture(
            lambda: steps.run(fields.on_device, size),
            (lambda: None) if self._ranks is None else self._ranks.meet,
        )
        first, second = captured.result
        kept = first if size.every or not size.prompts else None
        return StepGraph(fields, replace(captured, result=(kept, second)))


def _asks_host(run: Callable[[], object]) -> bool:
    """Whether what is run on a GPU waits for it, or for the host, and so cannot be captured."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False
