"""Rows of recurrent states: one for each place of the batch, and snapshots of them; pure counting.

A running sequence's state is in the row of its place, which holds nothing before its first token.
Beside the blocks of the cache a new sequence needs the state after the last of them, so a hit ends
where a snapshot was taken: at the last whole block of a prompt, where its beginning first differed
from what the cache knew, and at every `EVERY`th block. What has not been found for the longest time
goes first.

Drafts may not be what comes, and a state does not go back over them. So a step keeps the state
before each of its drafts, and the sequence goes on with the one before the first that was wrong.

Sums are grouped by pieces of a prompt: [0, piece), [piece, 2 piece) and so on. No step ends inside
of one, and what comes after the prompt is computed token by token, so that a sequence's bits do not
depend on how it is cut into steps, preempted or found; where snapshots are rounded, they depend on
what of it is found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kernels.op_inputs import KV_BLOCK

EVERY = 8  # blocks between two snapshots in the middle of a prompt
SNAPSHOTS = 32  # at least, by default
DRAFTS = 16  # of a step, at least


def piece_of(step: int, places: int) -> int:
    """Tokens of a piece: a whole block, or a power of two that fits beside decodes in a step."""
    room = max(1, min(KV_BLOCK, step - places + 1))
    return 1 << (room.bit_length() - 1)


def whole_pieces(start: int, count: int, prompt: int, piece: int) -> int:
    """Of `count` tokens from `start` on as many as end no piece of a prompt too early."""
    end = start + count
    return count if end >= prompt else max(0, end // piece * piece - start)


class StateRows:
    """Which row holds which state.

    Args:
        places: Rows of the batch, the spare one included.
        snapshots: Rows after those of drafts.
        piece: Tokens of a piece.
        drafts: Rows after these, of the states before drafts.
        int8: Whether snapshots are rounded, so that their rows are for nothing else.

    Attributes:
        rows: All rows.
        kept: The first row of snapshots.
        wanted: By place, the row that gets the state after so many tokens.
    """

    def __init__(
        self, places: int, snapshots: int, piece: int, drafts: int = 0, *, int8: bool = False
    ) -> None:
        self.piece, self.int8, self.kept = piece, int8, places + drafts
        self.rows = self.kept + snapshots
        self.wanted: dict[int, dict[int, int]] = {}
        self._drafted = dict[int, dict[int, int]]()  # as `wanted`
        self._before = list(range(places, places + drafts))  # rows of the states before drafts
        self._free = list(range(places + drafts, self.rows))
        self._found: OrderedDict[int, int] = OrderedDict()  # row of a node's state, oldest first
        self._copies: list[tuple[int, int]] = []

    def __contains__(self, node: int) -> bool:
        """Whether the state after a node's block is there, by the node's number."""
        return node in self._found

    def restore(self, node: int, place: int) -> None:
        """Begin at a place with the state after a node's block."""
        self._found.move_to_end(node)
        self._copies.append((self._found[node], place))

    def copy(self, source: int, place: int) -> None:
        """Begin at a place with the state of another one."""
        self._copies.append((source, place))

    @property
    def drafts(self) -> int:
        """Most drafts of a step."""
        return len(self._before)

    def reserve(self, drafts: int) -> None:
        """Have rows for so many drafts of a step, at the cost of snapshots, as far as these go."""
        while not self.int8 and len(self._before) < drafts:
            if (row := self._spare_row()) is None:
                break
            self._before.append(row)

    def _spare_row(self) -> int | None:
        """A row of snapshots: a free one, or that of the snapshot not found for the longest."""
        if not self._free and self._found:
            return self._found.popitem(last=False)[1]
        return self._free.pop() if self._free else None

    def want(self, place: int, ends: Iterable[int]) -> None:
        """Keep the states of a place after so many tokens, as far as rows are there."""
        self.give_up(place)
        own = self.wanted.setdefault(place, {})
        for end in sorted(ends, reverse=True):  # the last one is found most often
            if (row := self._spare_row()) is not None:
                own[end] = row

    def keep_before(self, drafts: Iterable[tuple[int, int, int]]) -> None:
        """Keep the states of the next step before each of its drafts.

        Args:
            drafts: Of each sequence that has any, its place, how many tokens are before the first
                one, and how many there are: at most `self.drafts` in all.
        """
        self._drafted, rows = {}, iter(self._before)
        for place, length, count in drafts:
            self._drafted[place] = {length + i: next(rows) for i in range(count)}

    def go_back(self, place: int, computed: int) -> None:
        """Go on with the state after so many tokens: those and the drafts that were right."""
        row = self._drafted.pop(place, {}).get(computed)
        if row is not None:
            self._copies.append((row, place))

    def before_draft(self, place: int, computed: int) -> int | None:
        """The row that gets the state of a place after so many tokens, if a draft comes next."""
        return self._drafted.get(place, {}).get(computed)

    @property
    def keeping(self) -> list[int]:
        """Places of which states are kept further on."""
        return [place for place, own in self.wanted.items() if own]

    def taken(self, place: int, computed: int) -> list[tuple[int, int]]:
        """What was kept by a step that ends after so many tokens: (tokens, row)."""
        own = self.wanted.get(place, {})
        return [(end, own.pop(end)) for end in sorted(own) if end <= computed]

    def note(self, node: int | None, row: int) -> None:
        """A row holds the state after a node's block; it is free for None, and if one is there."""
        if node is None or node in self._found:
            self._free.append(row)
        else:
            self._found[node] = row

    def give_up(self, place: int) -> None:
        """Whoever was at a place has left it."""
        self._drafted.pop(place, None)
        self._free.extend(self.wanted.pop(place, {}).values())

    def forget(self) -> None:
        """Nothing of what was kept is found any more."""
        self._free.extend(self._found.values())
        self._found.clear()

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) to be done in this order before the next step; given once."""
        copies, self._copies = self._copies, []
        return copies

    def adds_up(self) -> bool:
        """Whether each snapshot's row is free, found or about to be taken."""
        wanted = [row for own in self.wanted.values() for row in own.values()]
        rows = {*self._free, *self._found.values(), *wanted, *self._before}
        count = len(self._free) + len(self._found) + len(wanted) + len(self._before)
        return len(rows) == count == self.rows - min(rows, default=self.rows)
