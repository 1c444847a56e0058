"""What a model's own code says of it: its blocks, what their layers read, and what it caches.

Nothing is declared here: the model is built on the meta device from transformers' class and run
there once (`formats.modeling.trace`), which tells what calls attention and who reads what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class AttentionSite:
    """Attention of one block, as its module calls transformers' attention function.

    Attributes:
        module: Full name of the module that calls it.
        query_heads: Heads of the queries.
        kv_heads: Heads of K, and of V.
        key_size: Elements of a head of the queries and of K.
        value_size: Elements of a head of V.
        window: Tokens that a query sees, itself among them; None for all before it.
        reach: Tokens of a chunk, in which alone queries see those before them, so that only
            sequences of one chunk are run here; None where nothing is cut.
        arguments: Names of the other arguments that change it, such as `softcap` and `s_aux`.
        value: Full name of the linear layer whose output is V as it is; None where none is.
        output: Full name of the linear layer that reads what attention gives; None where none does.
        lender: Full name of the module of an earlier block whose K and V it reads; None where they
            are its own.
    """

    module: str
    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None
    arguments: tuple[str, ...] = ()
    value: str | None = None
    output: str | None = None
    lender: str | None = None
    reach: int | None = None


@dataclass(frozen=True)
class BlockStructure:
    """One decoder block.

    Attributes:
        attention: Its attention; None where it has none.
        linears: Full names of the linear layers that can be quantized, experts' layers among them.
        routers: Full names of what gives experts their weights: linear layers that stay in float.
        inputs: Of linear layers and routers, a name for what each reads: that of the module that
            made it, or of the first layer that reads it.
        norms: Names among those of `inputs` that are norms with a weight for each channel.
        whole: Full names of expert stacks that are stored as they are computed, and stay in float.
        weighed: Full names of linear layers whose weight its code looks at, beside calling them;
            they stay what they are in its code, and in float.
        mixers: Names, in the code, of the modules that keep a state beside K and V
            (`formats.modeling.states`).
        narrow: Full names of other linear layers that stay in float, as they weigh what others
            compute.
        outputs: How many values its code gives as a tuple; None where it gives hidden states alone.
        lends: Key in the mapping that its code is handed (`formats.modeling.trace.handed_empty`)
            under which it puts K and V for later blocks; None where it puts nothing there.
    """

    name: str
    attention: AttentionSite | None
    linears: tuple[str, ...]
    routers: tuple[str, ...]
    inputs: Mapping[str, str]
    norms: tuple[str, ...]
    whole: tuple[str, ...] = ()
    weighed: tuple[str, ...] = ()
    mixers: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    outputs: int | None = None
    lends: str | None = None

    @property
    def cache(self) -> AttentionSite | None:
        """Its attention, where that has K and V of its own."""
        site = self.attention
        return None if site is None or site.lender is not None else site


@dataclass(frozen=True)
class Structure:
    """A decoder as its code has it. Names are those of the checkpoint's files.

    Attributes:
        list: Name, in the code, of the module that holds the blocks.
        embedding: Full name of the token embedding.
        norm: Full name of the norm after the last block; None where there is none.
        head: Full name of the layer that gives logits.
        stored: Name in the files of each tensor of the code, where the two differ.
        stacks: Of each parameter in the files that holds all experts of a block, the names of
            their weights, in the order of its rows.
        listed: The same of parameters of the code whose layers files have one by one: there are
            files that have them as the code does.
        tied: Tensors that may be missing from the files, and the one that each is then.
    """

    blocks: tuple[BlockStructure, ...]
    list: str
    embedding: str
    norm: str | None
    head: str
    stored: Mapping[str, str]
    stacks: Mapping[str, tuple[str, ...]]
    listed: Mapping[str, tuple[str, ...]]
    tied: Mapping[str, str]

    @property
    def window(self) -> bool:
        """Whether any block sees a window of tokens only."""
        return any(site.window is not None for site in self.attentions)

    @cached_property
    def attentions(self) -> tuple[AttentionSite, ...]:
        """Attention of the blocks that have any, in their order."""
        return tuple(block.attention for block in self.blocks if block.attention is not None)

    @cached_property
    def caches(self) -> tuple[AttentionSite, ...]:
        """Those of them that have K and V of their own."""
        return tuple(site for site in self.attentions if site.lender is None)

    @cached_property
    def mixers(self) -> tuple[str, ...]:
        """Names, in the code, of all modules that keep a state beside K and V."""
        return tuple(name for block in self.blocks for name in block.mixers)

    @cached_property
    def _by_name(self) -> dict[str, BlockStructure]:
        return {block.name: block for block in self.blocks}

    @cached_property
    def quantizable(self) -> frozenset[str]:
        """Full names of the linear layers of all blocks that can be quantized."""
        return frozenset(name for block in self.blocks for name in block.linears)

    @cached_property
    def narrow(self) -> frozenset[str]:
        """Full names of the linear layers of all blocks that weigh what others compute."""
        return frozenset(name for block in self.blocks for name in block.narrow)

    @cached_property
    def routers(self) -> frozenset[str]:
        """Full names of the layers of all blocks that say how much an expert counts."""
        return frozenset(name for block in self.blocks for name in block.routers)

    def block(self, name: str) -> BlockStructure:
        """The block of that full name."""
        return self._by_name[name]

    def stored_name(self, tensor: str) -> str:
        """Name in the files of a tensor of the code."""
        return self.stored.get(tensor, tensor)
