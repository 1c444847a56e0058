"""Several engines of one model as one: requests are spread, and a dead one leaves the others.

A request goes to the engine that has the least to compute before it is answered. An engine's cost
is counted in tokens:

    cost = prompt - known + queued + BLOCK * in_flight

where `known` is how much of the prompt the engine should hold in its prefix cache, `queued` what it
has yet to compute of prompts before this one, and each request in flight stands for a block of
tokens. So requests that begin alike stay together until the queue there costs more than computing
the beginning again; then a second engine computes it, and from there on both share the load. A rule
that looks at the prefix alone would send everything that begins with a common system prompt to one
engine. The cost is that of NVIDIA Dynamo's router; what the caches hold is estimated as by SGLang's
router.

`KnownPrefixes` is that estimate: of one engine, from the prompts that were sent to it.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from inference.beam_search import BeamParams, Hypothesis
from inference.requests.request import SamplingParams
from inference.server.engine_client import EngineClient, State, Unavailable
from inference.server.messages import EngineInfo
from inference.server.stream import DeltaStream

LOG = logging.getLogger("ptq.serve")


class EngineFleet:
    """Engines with the same checkpoint and sizes, as the application sees them.

    All must load. One that dies later takes its requests along, whose clients are told; the others
    go on, until the last is dead.

    Args:
        engines: One at least.
        prefix_cache: Whether they keep what prompts have computed.

    Attributes:
        engines: As given; an engine's number is its place among them.
    """

    def __init__(self, engines: Sequence[EngineClient], *, prefix_cache: bool = True) -> None:
        self.engines, self._prefix_cache = tuple(engines), prefix_cache
        self._routes: Router | None = None
        self._setting = asyncio.Lock()  # of adapters: one change after the other

    @property
    def state(self) -> State:
        """`starting` until all are ready; `dead` when none can answer; else as those that live."""
        living = {engine.state for engine in self.engines} - {"dead"}
        if not living or any(each.state == "dead" and not each.loaded for each in self.engines):
            return "dead"
        for state in ("draining", "starting"):
            if state in living:
                return state
        return "ready"

    @property
    def reason(self) -> str | None:
        """Which engines are dead, and why; None while it goes on without them."""
        return "; ".join(self.losses) if self.state == "dead" else None

    @property
    def losses(self) -> list[str]:
        """Which engines are dead, and why."""
        return [
            f"engine {number} of {len(self.engines)}: {engine.reason}"
            for number, engine in enumerate(self.engines)
            if engine.state == "dead"
        ]

    @cached_property
    def info(self) -> EngineInfo:
        """What they are together: places and blocks are summed.

        Raises:
            Unavailable: they are loading.
        """
        each = [engine.info for engine in self.engines]
        device = ", ".join(one.device for one in each)
        if len({one.device for one in each}) < len(each):
            device = f"{len(each)} x {each[0].device}"
        return replace(
            each[0],
            max_batch_size=sum(one.max_batch_size for one in each),
            kv_blocks=sum(one.kv_blocks for one in each),
            device=device,  # such as `cuda:0, cuda:1` or `2 x cpu`
        )

    @property
    def adapters(self) -> Mapping[str, str]:
        """Folders of the adapters that requests may name: what all engines that live have loaded.

        Raises:
            Unavailable: they are loading, or dead.
        """
        if not self._living:
            raise self._all_dead()
        first, *others = [engine.adapters for engine in self._living]
        return {name: path for name, path in first.items() if all(name in own for own in others)}

    @property
    def _living(self) -> list[EngineClient]:
        return [engine for engine in self.engines if engine.state != "dead"]

    @property
    def in_flight(self) -> int:
        """Requests that wait or run."""
        return sum(engine.in_flight for engine in self.engines)

    @property
    def routed(self) -> Sequence[Mapping[str, int]]:
        """For each engine, requests that were sent there for the `prefix` and for its `load`."""
        return [{} for _ in self.engines] if self._routes is None else self._routes.routed

    async def ready(self) -> EngineInfo:
        """Wait until all are warm.

        Raises:
            Unavailable: one died before.
        """
        waits = [asyncio.ensure_future(engine.ready()) for engine in self.engines]
        try:
            await asyncio.gather(*waits)
        except Unavailable as error:
            raise Unavailable(self.reason or str(error)) from error
        finally:
            for wait in waits:
                wait.cancel()
        return self.info

    async def dead(self) -> str:
        """Wait until none can answer, and log each that dies before; gives the reasons."""
        waits = {asyncio.ensure_future(engine.dead()) for engine in self.engines}
        try:
            while self.state != "dead":
                logged = len(self.losses)
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                waits = {wait for wait in waits if not wait.done()}
                if self.state != "dead":
                    for loss in self.losses[logged:] or self.losses:
                        LOG.error("%s; the other %d go on without it", loss, len(self._living))
        finally:
            for wait in waits:
                wait.cancel()
        return self.reason or ""

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> DeltaStream:
        """Queue a request at the engine that has the least to compute for it.

        Raises:
            RequestError, Overloaded, Unavailable: as `EngineClient.submit`; the queue is full where
                that of each engine is.
        """
        reuse = params.prompt_logprobs is None
        engine, new_tokens = self._route(prompt, params.adapter, reuse=reuse)
        return engine.submit(prompt, params, new_tokens)

    async def beam(self, prompt: Sequence[int], params: BeamParams) -> list[Hypothesis]:
        """Search for the likeliest continuations; as `EngineClient.beam`."""
        engine, new_tokens = self._route(prompt, params.adapter)
        return await engine.beam(prompt, params, new_tokens)

    async def set_adapter(self, adapter: str, path: str | None) -> None:
        """Load or unload an adapter at all engines; where one refuses, it is undone at the others.

        Raises:
            RequestError, Unavailable: as `EngineClient.set_adapter`.
        """
        async with self._setting:
            before, engines = self.adapters.get(adapter), self._living
            work = [engine.set_adapter(adapter, path) for engine in engines]
            done = await asyncio.gather(*work, return_exceptions=True)
            pairs = list(zip(engines, done, strict=True))
            faults = [found for engine, found in pairs if found and engine.state != "dead"]
            if faults:
                changed = [engine for engine, found in pairs if not found]
                undo = [engine.set_adapter(adapter, before) for engine in changed]
                await asyncio.gather(*undo, return_exceptions=True)
                raise faults[0]

    async def drain(self, seconds: float) -> None:
        """Take no more requests; wait until all have ended, and end them after so many seconds."""
        await asyncio.gather(*(engine.drain(seconds) for engine in self.engines))

    def _all_dead(self) -> Unavailable:
        return Unavailable(f"the engines are dead: {self.reason}")

    def _route(
        self, prompt: Sequence[int], adapter: str | None, *, reuse: bool = True
    ) -> tuple[EngineClient, int]:
        """As `Router.choose`; raise where none may take the prompt."""
        info = self.info
        if self.state == "dead":
            raise self._all_dead()
        if self._routes is None:
            blocks = [each.info.kv_blocks if self._prefix_cache else 0 for each in self.engines]
            self._routes = Router(blocks, info.block_size)
        self._living[0].check(prompt)  # before it is remembered as sent
        loads = [None if e.state == "dead" else _load(e, len(prompt)) for e in self.engines]
        engine, new_tokens = self._routes.choose(prompt, loads, reuse=reuse, adapter=adapter)
        return self.engines[engine], new_tokens


def _load(engine: EngineClient, prompt: int) -> Load:
    """What an engine has to do, and whether a prompt of so many tokens may wait there."""
    places = engine.info.max_batch_size
    full = engine.requests.full(prompt, places) is not None
    return Load(engine.requests.new_tokens, engine.in_flight, places, full)


def block_hashes(tokens: Sequence[int], block: int, adapter: str | None = None) -> list[int]:
    """A hash for each whole block of a prompt that stands for it and all tokens before it.

    The last token is left out, as the cache does: an engine computes at least one.

    Args:
        block: Tokens of a block.
        adapter: What it runs with; what is computed with another, or without, is not its own.
    """
    data, hashes, before = array("q", tokens), [], hash(adapter)
    for start in range(0, (len(data) - 1) // block * block, block):
        before = hash((before, data[start : start + block].tobytes()))
        hashes.append(before)
    return hashes


class KnownPrefixes:
    """Beginnings of prompts that were sent to an engine, as many as its cache has blocks.

    An estimate: the engine's own cache also holds answers, and gives blocks up to requests that
    run. What is wrong here costs time, never an answer: the engine compares tokens.

    Args:
        blocks: How many are remembered; those that were used least lately are forgotten first.
    """

    def __init__(self, blocks: int) -> None:
        self._most, self._known = blocks, OrderedDict[int, None]()

    def __len__(self) -> int:
        return len(self._known)

    def match(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks are known; `hashes` are of `block_hashes`."""
        found = 0
        while found < len(hashes) and hashes[found] in self._known:
            found += 1
        return found

    def add(self, hashes: Sequence[int]) -> None:
        """Remember a prompt's blocks; of one prompt the last are forgotten first."""
        for each in reversed(hashes[: self._most]):
            self._known[each] = None
            self._known.move_to_end(each)
        while len(self._known) > self._most:
            self._known.popitem(last=False)


@dataclass(frozen=True)
class Load:
    """What an engine has to do.

    Attributes:
        queued: Tokens that it has yet to compute of prompts without an answer.
        in_flight: Requests that wait or run there.
        places: Requests that can run at once.
        full: Whether its queue takes no more.
    """

    queued: int
    in_flight: int
    places: int
    full: bool = False


class Router:
    """Chooses engines, and remembers what it sent where.

    Args:
        blocks: Of each engine's cache; 0 where it keeps no prefixes.
        block: Tokens of a block.

    Attributes:
        routed: How many requests were sent to each engine, by what decided: `prefix` (it should
            hold the beginning of the prompt) or `load`.
    """

    def __init__(self, blocks: Sequence[int], block: int) -> None:
        self._known = [KnownPrefixes(most) for most in blocks]
        self._block = block
        self.routed = [Counter[str]() for _ in blocks]

    def choose(
        self,
        prompt: Sequence[int],
        loads: Sequence[Load | None],
        *,
        reuse: bool = True,
        adapter: str | None = None,
    ) -> tuple[int, int]:
        """The engine for a prompt, and how many of its tokens that should have to compute.

        The prompt is remembered as sent there. Engines with a free place come first, then those
        whose queue has room; where costs are equal, the one that knows the least.

        Args:
            loads: Of each engine; None of one that takes nothing. One at least is there.
            reuse: Whether the request takes what the cache holds.
        """
        hashes = block_hashes(prompt, self._block, adapter)
        ranks: list[tuple[bool, bool, int, int, int, int]] = []
        for engine, load in enumerate(loads):
            if load is None:
                continue
            known = self._known[engine].match(hashes) * self._block if reuse else 0
            cost = len(prompt) - known + load.queued + self._block * load.in_flight
            busy, size = load.in_flight >= load.places, len(self._known[engine])
            ranks.append((load.full, busy, cost, size, engine, known))
        *_, engine, known = min(ranks)
        self._known[engine].add(hashes)
        self.routed[engine]["prefix" if known else "load"] += 1
        return engine, len(prompt) - known


ServedEngine = EngineClient | EngineFleet  # what the application asks
