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

`KnownPrefixes` is that estimate: of one engine, from the prompts that were sent to it.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


def block_hashes(tokens: Sequence[int], block: int, adapter: str | None = None) -> list[int]:
    """A hash for each whole block of a prompt that stands for it and all tokens before it.

    The last token is left out, as the cache does: an engine computes at least one.

    Args:
        tokens: The prompt.
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
            prompt: Token ids.
            loads: Of each engine; None of one that takes nothing. One at least is there.
            reuse: Whether the request takes what the cache holds.
            adapter: What it runs with.
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
