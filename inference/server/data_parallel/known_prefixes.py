"""What an engine's prefix cache should hold, estimated from the prompts that were sent to it."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence


def block_hashes(tokens: Sequence[int], block: int) -> list[int]:
    """A hash for each whole block of a prompt that stands for it and all tokens before it.

    The last token is left out, as the cache does: an engine computes at least one.

    Args:
        tokens: The prompt.
        block: Tokens of a block.
    """
    data, hashes, before = array("q", tokens), [], 0
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
