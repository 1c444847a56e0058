"""Which tokens the blocks of the cache hold, so that a request with the same beginning finds them.

K and V of a token depend on all tokens before it. So what a whole block holds is known by its 64
tokens and by the block before it: blocks form a tree, and equal beginnings share its nodes. A node
is found by (number of the node before, its own tokens), compared as they are and not by a hash of
them, so that no two contents are ever taken for one another. Roots stand for what else decides a
content: each engine has one of its own, so that it never finds what another model or another scheme
of the cache has written.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from kernels.op_inputs import KV_BLOCK

Key = tuple[int, bytes]


@dataclass(eq=False, slots=True)
class Node:
    """A whole block of tokens after those of the nodes before it.

    Attributes:
        key: Number of the node before, or of a root, and the tokens.
        number: Its own; none is used twice.
        block: Where the cache has it; None while a request is computing it.
        seen: Whether finite logits have come of its K and V; until then they may hold NaN.
    """

    key: Key
    number: int
    block: int | None = None
    seen: bool = False


class PrefixTree:
    """Nodes by their tokens, and by their blocks."""

    def __init__(self) -> None:
        self._nodes: dict[Key, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._numbers = count(1)

    def __contains__(self, block: int) -> bool:
        """Whether a block has a node."""
        return block in self._by_block

    def new_root(self) -> int:
        """The number of a root under which there is nothing yet."""
        return next(self._numbers)

    def find(self, parent: int, tokens: bytes) -> Node | None:
        """The node of a block of tokens after a parent."""
        return self._nodes.get((parent, tokens))

    def add(self, parent: int, tokens: bytes) -> Node:
        """A node that there was not, for a block that is not computed yet."""
        node = Node((parent, tokens), next(self._numbers))
        self._nodes[node.key] = node
        return node

    def fill(self, node: Node, block: int) -> None:
        """Note in which block a node's K and V are."""
        node.block = block
        self._by_block[block] = node

    def holds(self, node: Node) -> bool:
        """Whether a node can still be found."""
        return self._nodes.get(node.key) is node

    def remove(self, node: Node) -> None:
        """Forget a node; its block, if it has one, holds nothing that can be found any more."""
        if self.holds(node):
            del self._nodes[node.key]
        if node.block is not None:
            del self._by_block[node.block]
            node.block = None

    def pop(self, block: int) -> Node:
        """Forget the node of a block."""
        node = self._by_block[block]
        self.remove(node)
        return node

    def clear(self) -> None:
        """Forget all nodes; roots stay."""
        for node in (*self._nodes.values(), *self._by_block.values()):
            node.block = None
        self._nodes.clear()
        self._by_block.clear()

    def agrees(self) -> bool:
        """Whether blocks and nodes name each other."""
        return all(node.block == block for block, node in self._by_block.items())


def whole_blocks(tokens: Sequence[int], first: int = 0) -> Iterator[bytes]:
    """Tokens of each whole block in order, from the `first` on; the rest of them is left out."""
    for end in range((first + 1) * KV_BLOCK, len(tokens) + 1, KV_BLOCK):
        yield array("i", tokens[end - KV_BLOCK : end]).tobytes()
