"""How many drafts were proposed and accepted, in numbers that are printed and sent."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from formats.namespace import later

if TYPE_CHECKING:
    from inference.scheduling.batch import Ints
    from inference.speculate.decoder import SpeculativeDecoder
with later():
    import numpy as np

SHOWN = 8  # positions of a line of text
UNCOUNTED = 256  # steps whose drafts are noted before they are counted


class Tally:
    """Counts drafts by their position in a chain.

    Args:
        depth: Most drafts of a sequence in a step.

    Attributes:
        steps: Times that a sequence had drafts.
    """

    def __init__(self, depth: int) -> None:
        self._counts = np.zeros((2, depth), np.int64)
        self._noted: list[tuple[Ints, Ints]] = []
        self.steps = 0

    def note(self, drafts: Ints, accepted: Ints) -> None:
        """Sequences had so many drafts, of which so many were accepted."""
        self.steps += len(drafts)
        self._noted.append((drafts, accepted))
        if len(self._noted) > UNCOUNTED:  # not in each step, whose time it would take
            self.counted()

    def counted(self) -> Ints:
        """Drafts verified and drafts accepted, int64 [2, depth]."""
        noted, self._noted = self._noted, []
        position = np.arange(self._counts.shape[1])
        for pair in noted:
            for row, counts in zip(self._counts, pair, strict=True):
                row += np.count_nonzero(counts[:, None] > position, axis=0)
        return self._counts


@dataclass(frozen=True)
class DraftCounts:
    """Drafts since an engine started.

    Attributes:
        steps: Times that a sequence had drafts in a step.
        proposed: Drafts that were computed, by their position after the last token.
        accepted: Those that the model chose, too, by position.
    """

    steps: int = 0
    proposed: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @classmethod
    def of(cls, speculation: SpeculativeDecoder | None) -> DraftCounts:
        """What an engine has counted; nothing where it does not speculate."""
        if speculation is None:
            return cls()
        proposed, accepted = speculation.proposed.tolist(), speculation.accepted.tolist()
        return cls(speculation.steps, tuple(proposed), tuple(accepted))

    def since(self, before: DraftCounts) -> DraftCounts:
        """What was counted after an earlier moment of the same engine."""
        pairs = (self.proposed, before.proposed), (self.accepted, before.accepted)
        proposed, accepted = (
            tuple(a - (b[i] if i < len(b) else 0) for i, a in enumerate(all_)) for all_, b in pairs
        )
        return DraftCounts(self.steps - before.steps, proposed, accepted)

    def __add__(self, other: DraftCounts) -> DraftCounts:
        """Of two times, of one engine or of two."""
        both = (self.proposed, other.proposed), (self.accepted, other.accepted)
        proposed, accepted = (
            tuple(a + b for a, b in zip_longest(*pair, fillvalue=0)) for pair in both
        )
        return DraftCounts(self.steps + other.steps, proposed, accepted)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a sequence in a step in which it had drafts; 1 without any."""
        return 1 + sum(self.accepted) / max(self.steps, 1)

    @property
    def rates(self) -> list[float]:
        """Share of drafts that were accepted, by position, as far as there were any."""
        pairs = zip(self.accepted, self.proposed, strict=True)
        return [a / p for a, p in pairs if p]

    def text(self) -> str:
        """One line for a terminal."""
        if not self.steps:
            return "no drafts were made"
        rates = " ".join(f"{rate:.0%}" for rate in self.rates[:SHOWN])
        return (
            f"{self.tokens_per_step:.2f} tokens a step with drafts (drafted {self.steps} times); "
            f"accepted drafts by position: {rates}"
        )
