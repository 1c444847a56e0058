"""Which block of the paged cache belongs to whom; pure bookkeeping."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from formats.errors import EngineError
from kernels.attention_inputs import KV_BLOCK


@dataclass(frozen=True)
class KVStats:
    """Blocks of the cache; `free + used + cached == total`, always."""

    total: int
    free: int
    used: int
    cached: int = 0


class BlockManager:
    """Hands out blocks of 64 tokens.

    Args:
        total: Number of blocks.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = deque(range(total))
        self._tables: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def table(self, owner: str) -> list[int]:
        """Blocks of an owner in the order of its tokens."""
        return self._tables.get(owner, [])

    def missing(self, owner: str, tokens: int) -> int:
        """Blocks that an owner lacks to hold so many tokens."""
        return max(0, blocks_for(tokens) - len(self.table(owner)))

    def grow(self, owner: str, tokens: int) -> bool:
        """Give an owner blocks for so many tokens, or, if there are too few, change nothing."""
        count = self.missing(owner, tokens)
        if count > len(self._free):
            return False
        table = self._tables.setdefault(owner, [])
        table.extend(self._free.popleft() for _ in range(count))
        return True

    def release(self, owner: str) -> None:
        """Take all blocks of an owner back."""
        self._free.extend(self._tables.pop(owner, []))

    def stats(self) -> KVStats:
        """Counts of all blocks."""
        return KVStats(self.total, self.free, sum(map(len, self._tables.values())))

    def check(self) -> None:
        """Check that every block is free or has one owner.

        Raises:
            EngineError: a block was lost or is held twice.
        """
        held = [block for table in self._tables.values() for block in table]
        if sorted([*self._free, *held]) != list(range(self.total)):
            raise EngineError(
                f"the cache's blocks do not add up: {len(self._free)} free, {len(held)} held, "
                f"{self.total} in all"
            )


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // KV_BLOCK)
