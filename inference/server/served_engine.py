"""What the application knows of what answers its requests: one engine, or several as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from inference.beam_search import BeamParams, Hypothesis
from inference.requests.request import SamplingParams
from inference.server.engine_client import EngineClient, State
from inference.server.messages import EngineInfo
from inference.server.stream import DeltaStream


class ServedEngine(Protocol):
    """An `EngineClient`, or an `EngineFleet`; both say what each of these does."""

    @property
    def state(self) -> State:
        """Whether requests are taken."""
        ...

    @property
    def reason(self) -> str | None:
        """Why it is dead; None before."""
        ...

    @property
    def info(self) -> EngineInfo:
        """What engine it is; of several, what they are together."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests that wait or run."""
        ...

    @property
    def engines(self) -> Sequence[EngineClient]:
        """Each engine."""
        ...

    @property
    def routed(self) -> Sequence[Mapping[str, int]]:
        """Requests that were sent to each engine, by what decided; empty where there is one."""
        ...

    async def ready(self) -> EngineInfo:
        """Wait until requests are taken."""
        ...

    async def dead(self) -> str:
        """Wait until no request can be answered any more; gives the reason."""
        ...

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> DeltaStream:
        """Queue a request."""
        ...

    async def beam(self, prompt: Sequence[int], params: BeamParams) -> list[Hypothesis]:
        """Search for the likeliest continuations."""
        ...

    async def drain(self, seconds: float) -> None:
        """Take no more requests, and wait for the end of all."""
        ...
