"""Which engine takes a request: the one that has the least to compute before it is answered.

An engine's cost for a request is counted in tokens:

    cost = prompt - known + queued + BLOCK * in_flight

where `known` is how much of the prompt the engine should hold in its prefix cache, `queued` what it
has yet to compute of prompts before this one, and each request in flight stands for a block of
tokens. So requests that begin alike stay together until the queue there costs more than computing
the beginning again; then a second engine computes it, and from there on both share the load. A rule
that looks at the prefix alone would send everything that begins with a common system prompt to one
engine. The cost is that of NVIDIA Dynamo's router; what the caches hold is estimated as by SGLang's
router.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from inference.server.data_parallel.known_prefixes import KnownPrefixes, block_hashes


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


@dataclass(frozen=True)
class Route:
    """Where a request goes.

    Attributes:
        engine: Its number.
        new_tokens: Tokens of the prompt that it should have to compute.
    """

    engine: int
    new_tokens: int


@dataclass
class Routed:
    """What was sent to an engine.

    Attributes:
        requests: Their number, by what decided: `prefix` (it should hold the beginning of the
            prompt) or `load`.
        prefix_tokens: Tokens of their prompts that it should have held.
    """

    requests: Counter[str] = field(default_factory=Counter)
    prefix_tokens: int = 0


class Router:
    """Chooses engines, and remembers what it sent where.

    Args:
        blocks: Of each engine's cache; 0 where it keeps no prefixes.
        block: Tokens of a block.

    Attributes:
        routed: What was sent, by engine.
    """

    def __init__(self, blocks: Sequence[int], block: int) -> None:
        self._known = [KnownPrefixes(most) for most in blocks]
        self._block = block
        self.routed = [Routed() for _ in blocks]

    def choose(
        self, prompt: Sequence[int], loads: Sequence[Load | None], *, reuse: bool = True
    ) -> Route:
        """The engine for a prompt, which is remembered as sent there.

        Engines with a free place come first, then those whose queue has room; where costs are
        equal, the one that knows the least.

        Args:
            prompt: Token ids.
            loads: Of each engine; None of one that takes nothing. One at least is there.
            reuse: Whether the request takes what the cache holds.
        """
        hashes = block_hashes(prompt, self._block)
        best: tuple[tuple[bool, bool, int, int, int], Route] | None = None
        for engine, load in enumerate(loads):
            if load is None:
                continue
            known = self._known[engine].match(hashes) * self._block if reuse else 0
            new = len(prompt) - known
            cost = new + load.queued + self._block * load.in_flight
            rank = load.full, load.in_flight >= load.places, cost, len(self._known[engine]), engine
            if best is None or rank < best[0]:
                best = rank, Route(engine, new)
        assert best is not None, "no engine takes requests"
        self._remember(best[1], len(prompt), hashes)
        return best[1]

    def _remember(self, route: Route, prompt: int, hashes: Sequence[int]) -> None:
        self._known[route.engine].add(hashes)
        routed, known = self.routed[route.engine], prompt - route.new_tokens
        routed.requests["prefix" if known else "load"] += 1
        routed.prefix_tokens += known
