"""Which block of the paged cache belongs to whom; pure bookkeeping.

A block is free, or used by the requests that hold it, or cached: nobody holds it, but what is in it
can be found again by its tokens (`inference.scheduling.prefix_tree`). Only whole blocks are found,
and only after the step that writes them was launched. Cached blocks are handed out again once none
is free, the one that nobody has held for the longest time first. Who holds a block holds those
before it, and gives back the last one first; so the end of a text goes before its beginning.

Blocks are shared in two ways: `take_prefix` gives a request whole blocks that another one has
computed, `fork` gives it all blocks of another. What two hold nobody writes to: of a block that is
partly filled, the first one to write gets a copy.

What may hold NaN does no harm: a request whose logits were not finite takes with it what nobody has
had finite logits of, after a failed step nothing is cached, and a block that nobody has looked at
is cleared before another request writes to it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from formats.errors import EngineError
from inference.scheduling.prefix_tree import Key, Node, PrefixTree, whole_blocks
from inference.scheduling.states import EVERY, StateRows
from kernels.op_inputs import KV_BLOCK


@dataclass(frozen=True)
class KVStats:
    """Blocks of the cache; `free + used + cached == total`, always.

    Attributes:
        total: All blocks.
        free: Those that hold nothing.
        used: Those that requests hold, each counted once.
        cached: Those that nobody holds, but whose tokens can be found.
        queried_tokens: Tokens of requests that were looked up when they began, all in all.
        hit_tokens: Those of them that needed no computing.
        preemptions: Times that a request gave its blocks up for another.
    """

    total: int
    free: int
    used: int
    cached: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0


class Fill(NamedTuple):
    """K and V that an adapter gives (prefix tuning), and where they are to be.

    Attributes:
        adapter: Its slot.
        start: Position of the first of them.
        slots: Of each, block * 64 + offset.
    """

    adapter: int
    start: int
    slots: list[int]


class BlockChanges(NamedTuple):
    """What is to be done to the cache before the next step.

    Attributes:
        copies: (source, destination); all sources are read before a destination is written.
        clears: Blocks that may hold NaN, and that another request may get.
        states: Rows of recurrent states, (source, destination), copied one after the other.
        fills: What adapters give, written after all else.
    """

    copies: list[tuple[int, int]]
    clears: list[int]
    states: Sequence[tuple[int, int]] = ()
    fills: Sequence[Fill] = ()


class Beginning(NamedTuple):
    """What there is of the beginning of a sequence.

    Attributes:
        computed: How many of its tokens can be found.
        coming: The last block after them that another one is about to compute, if there is any.
        following: The whole block after them all, which nobody has or will have yet.
    """

    computed: int = 0
    coming: Node | None = None
    following: Key | None = None


@dataclass
class Holding:
    """What an owner holds.

    Attributes:
        table: Its blocks in the order of its tokens.
        chain: Nodes of its first blocks: those that it found, then those that it computes itself
            and that nobody had computed before.
        filled: How many of them are computed.
    """

    table: list[int] = field(default_factory=list)
    chain: list[Node] = field(default_factory=list)
    filled: int = 0


class BlockManager:
    """Hands out blocks of 64 tokens.

    Args:
        total: Number of blocks.
        prefix_cache: Whether to find computed blocks again.
        states: Rows of recurrent states, without which a beginning is not found; None where a
            model keeps none.

    Attributes:
        promises: Times that owners have promised what they were about to compute.
    """

    def __init__(
        self, total: int, *, prefix_cache: bool = False, states: StateRows | None = None
    ) -> None:
        self.states = states
        self.total, self._prefix_cache, self.promises = total, prefix_cache, 0
        self._free = deque(range(total))
        self._owners = [0] * total  # how many hold each block
        self._held: dict[str, Holding] = {}
        self._tree = PrefixTree()
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest without an owner first
        self._partly_filled: set[int] = set()  # last blocks that were shared by `fork`
        self._changes: list[tuple[int | None, int]] = []  # (source, None for zeros; destination)
        self._fills: list[Fill] = []

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Blocks that can be handed out: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def shares_partly_filled(self) -> bool:
        """Whether an owner may need a copy of its last block before it writes to it."""
        return bool(self._partly_filled)

    def new_root(self) -> int:
        """For another model or scheme: the root of what it computes; see `take_prefix`."""
        return self._tree.new_root()

    def table(self, owner: str) -> list[int]:
        """Blocks of an owner in the order of its tokens."""
        held = self._held.get(owner)
        return held.table if held else []

    def missing(self, owner: str, tokens: int) -> int:
        """Blocks that an owner lacks to hold so many tokens and to write the last of them."""
        table = self.table(owner)
        return max(0, blocks_for(tokens) - len(table)) + self._needs_copy(table)

    def grow(self, owner: str, tokens: int) -> bool:
        """Give an owner blocks to write up to so many tokens, or, if there are too few, nothing.

        What it shares and would write to is replaced by a block of its own, and the copy is noted
        for `take_changes`.
        """
        if self.missing(owner, tokens) > self.available:
            return False
        table = self._held.setdefault(owner, Holding()).table
        if self._needs_copy(table):
            source, table[-1] = table[-1], self._take()
            self._owners[source] -= 1
            self._changes.append((source, table[-1]))
        table.extend(self._take() for _ in range(blocks_for(tokens) - len(table)))
        return True

    def take_prefix(self, owner: str, tokens: Sequence[int], root: int = 0) -> int:
        """Give a new owner the blocks in which the beginning of its tokens is computed already.

        Args:
            owner: Holds nothing yet.
            tokens: All its tokens; the last one is left to be computed.
            root: Of what the same model has computed with the same scheme.

        Returns:
            How many of its tokens they hold.
        """
        if not self._prefix_cache:
            return 0
        held = self._held[owner] = Holding()
        for node in self._with_state(self._known(tokens, root)):
            assert node.block is not None
            self._hold(node.block)
            held.table.append(node.block)
            held.chain.append(node)
        held.filled = len(held.chain)
        return held.filled * KV_BLOCK

    def look_up(self, tokens: Sequence[int], root: int) -> Beginning:
        """What there is of the beginning of some tokens."""
        parent, last, found, following = root, None, list[Node](), None
        for content in _usable(tokens) if self._prefix_cache else ():
            node = self._tree.find(parent, content)
            if node is None:
                following = (parent, content)
                break
            parent, last = node.number, node
            if node.block is not None:
                found.append(node)
        computed = KV_BLOCK * len(self._with_state(found))
        coming = last if last is not None and last.block is None else None
        return Beginning(computed, coming, following)

    def _known(self, tokens: Sequence[int], root: int) -> list[Node]:
        """Nodes of the beginning of a sequence whose blocks are computed."""
        found, parent = list[Node](), root
        for content in _usable(tokens):
            node = self._tree.find(parent, content)
            if node is None or node.block is None:
                break
            found.append(node)
            parent = node.number
        return found

    def _with_state(self, nodes: list[Node]) -> list[Node]:
        """Those of a beginning up to the last one after which a state is there, if one is kept."""
        if self.states is None:
            return nodes
        count = len(nodes)
        while count and nodes[count - 1].number not in self.states:
            count -= 1
        return nodes[:count]

    def begin_state(self, owner: str, place: int, tokens: Sequence[int], root: int) -> None:
        """Give a place the state that an owner begins with, and say which others are to be kept.

        Args:
            owner: Has found what there is of its tokens, and promised the rest of its prompt.
            tokens: Its prompt.
            root: As in `take_prefix`.
        """
        if self.states is None:
            return
        held = self._held[owner]
        if held.filled:
            self.states.restore(held.chain[held.filled - 1].number, place)
        if self._prefix_cache:
            own = len(held.chain) > held.filled  # else others have computed what comes next
            last = (len(tokens) - 1) // KV_BLOCK if own else len(self._known(tokens, root))
            ends = {last, *range(EVERY, last, EVERY)}
            self.states.want(place, (KV_BLOCK * end for end in ends if end > held.filled))

    def note_states(self, place: int, tokens: Sequence[int], root: int) -> None:
        """Let others find the states that a place kept of so many first tokens."""
        if self.states is None:
            return
        for end, row in self.states.taken(place, len(tokens)):
            nodes = self._known([*tokens[:end], 0], root)
            whole = len(nodes) * KV_BLOCK == end
            self.states.note(nodes[-1].number if whole else None, row)

    def is_coming(self, node: Node) -> bool:
        """Whether a block is still about to be computed."""
        return node.block is None and self._tree.holds(node)

    def promise(self, owner: str, tokens: Sequence[int], root: int = 0) -> int:
        """Note which blocks an owner is about to compute; `note_computed` lets others find them.

        Returns:
            How many of its first tokens they will be able to find, at most.
        """
        if not self._prefix_cache:
            return 0
        self.promises += 1
        chain = self._held[owner].chain
        parent = chain[-1].number if chain else root
        for content in whole_blocks(tokens, len(chain)):
            if self._tree.find(parent, content) is not None:
                break  # another one has it, or will have it
            chain.append(self._tree.add(parent, content))
            parent = chain[-1].number
        return len(chain) * KV_BLOCK

    def note_computed(self, owner: str, tokens: int) -> None:
        """Let others find what was promised of so many first tokens; their step is launched."""
        held = self._held[owner]
        for i in range(held.filled, min(tokens // KV_BLOCK, len(held.chain))):
            self._tree.fill(held.chain[i], held.table[i])
            held.filled = i + 1

    def fork(self, owner: str, new: str, tokens: int) -> None:
        """Let a new owner share the blocks of so many tokens that another one has computed."""
        held = self._held[owner]
        table = held.table[: blocks_for(tokens)]
        for block in table:
            self._hold(block)
        count = min(held.filled, tokens // KV_BLOCK)
        self._held[new] = Holding(table, held.chain[:count], count)
        if tokens % KV_BLOCK:
            self._partly_filled.add(table[-1])
        elif table:
            self._partly_filled.discard(table[-1])

    def release(self, owner: str, tokens: Sequence[int] = (), seen: int = 0, root: int = 0) -> None:
        """Take all blocks of an owner back; whole ones that it computed are cached.

        Args:
            owner: May hold nothing.
            tokens: Those that it has computed; nothing is cached of others.
            seen: How many of them finite logits have come of. What nobody has looked at may hold
                NaN, and is cleared before another request gets it.
            root: As in `take_prefix`.
        """
        held = self._held.pop(owner, Holding())
        if self._prefix_cache:
            self._keep(held, tokens, root)
        for node in held.chain[: seen // KV_BLOCK]:
            node.seen = True
        self._give_back(held, clear=not seen)

    def discard(self, owner: str) -> None:
        """Take all blocks of an owner back whose logits were not finite.

        What it computed is not cached, nor is what it shared, unless others got on well with it.
        """
        held = self._held.pop(owner, Holding())
        for node in held.chain:
            if not node.seen:
                self._tree.remove(node)
        self._give_back(held, clear=True)

    def forget(self) -> None:
        """Cache nothing any more of what was computed so far."""
        self._tree.clear()
        if self.states is not None:
            self.states.forget()
        self._free.extend(self._cached)
        self._cached.clear()
        self._fills.clear()  # of a step that failed before they were written
        for held in self._held.values():
            held.chain, held.filled = [], 0

    def fill(self, owner: str, adapter: int, tokens: range) -> None:
        """Have an adapter's K and V put where an owner has some of its first tokens."""
        table = self._held[owner].table
        slots = [table[token // KV_BLOCK] * KV_BLOCK + token % KV_BLOCK for token in tokens]
        self._fills.append(Fill(adapter, tokens.start, slots))

    def take_changes(self) -> BlockChanges | None:
        """What is to be done to the cache before the next step; given once. None: nothing."""
        states = [] if self.states is None else self.states.take_copies()
        if not self._changes and not states and not self._fills:
            return None
        fills, self._fills = self._fills, []
        origin: dict[int, int | None] = {}  # of what each block is to hold
        for source, block in self._changes:
            origin[block] = None if source is None else origin.get(source, source)
        self._changes.clear()
        copies = [(source, block) for block, source in origin.items() if source is not None]
        clears = [block for block, source in origin.items() if source is None]
        return BlockChanges(copies, clears, states, fills)

    def stats(self) -> KVStats:
        """Counts of all blocks."""
        return KVStats(self.total, self.free, self.total - self.available, len(self._cached))

    def check(self) -> None:
        """Check that every block is free, held or cached, and that owners are counted right.

        Raises:
            EngineError: a block was lost, or is two of these, or a count is wrong.
        """
        owners = [0] * self.total
        for held in self._held.values():
            for block in held.table:
                owners[block] += 1
        used = [block for block, count in enumerate(owners) if count]
        whole = sorted([*self._free, *self._cached, *used]) == list(range(self.total))
        known = self._tree.agrees() and all(block in self._tree for block in self._cached)
        kept = self.states is None or self.states.adds_up()
        if not whole or not known or not kept or owners != self._owners:
            raise EngineError(
                f"the cache's blocks do not add up: {len(self._free)} free, {len(used)} held, "
                f"{len(self._cached)} cached, {self.total} in all; owners counted "
                f"{sum(self._owners)}, found {sum(owners)}; states "
                f"{'add up' if kept else 'do not add up'}"
            )

    def _needs_copy(self, table: list[int]) -> bool:
        """Whether the next token goes into a block that others hold, too."""
        last = table[-1] if table and self._partly_filled else -1
        return last in self._partly_filled and self._owners[last] > 1

    def _take(self) -> int:
        """A block for a new owner."""
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            if not self._tree.pop(block).seen:
                self._changes.append((None, block))
        self._owners[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if not self._owners[block]:
            del self._cached[block]
        self._owners[block] += 1

    def _keep(self, held: Holding, tokens: Sequence[int], root: int) -> None:
        """Let others find the whole blocks of an owner that leaves; promises are withdrawn.

        Where another one has computed the same meanwhile, its block takes the place of the owner's.
        """
        chain, computed = held.chain, len(tokens) // KV_BLOCK
        for node in chain[max(held.filled, computed) :]:
            self._tree.remove(node)
        del chain[max(held.filled, computed) :]
        for i, content in enumerate(whole_blocks(tokens, held.filled), held.filled):
            if i == len(chain):
                parent = chain[-1].number if chain else root
                node = self._tree.find(parent, content)
                if node is not None and node.block is None:
                    return  # another one will say so when it has computed it
                chain.append(node or self._tree.add(parent, content))
                if node is not None and node.block is not None:
                    self._hold(node.block)
                    held.table.append(held.table[i])  # its own is given back, too
                    held.table[i] = node.block
                    continue
            self._tree.fill(chain[i], held.table[i])

    def _give_back(self, held: Holding, *, clear: bool) -> None:
        for block in reversed(held.table):
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self._tree:
                self._cached[block] = None
                continue
            self._free.append(block)
            self._partly_filled.discard(block)
            if clear:
                self._changes.append((None, block))


def _usable(tokens: Sequence[int]) -> Iterator[bytes]:
    """Tokens of the blocks that a sequence can use of others: its last token is to be computed."""
    return islice(whole_blocks(tokens), max(0, len(tokens) - 1) // KV_BLOCK)


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // KV_BLOCK)
