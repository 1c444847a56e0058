"""A decoder as its family declares it (`formats.families`), loaded.

    x = x + after(attention(before(x)))        x = x + after(feed_forward(before(x)))

RMSNorms before or after the sub-layers; grouped-query attention (Ainslie et al. 2023) with rotary
embedding and perhaps norms of q and k; gated MLPs or mixtures of them. Biases and routers of
experts are there if the checkpoint has their tensors.

Nothing here runs. Three interpreters read this description: `inference.cpu.loop` (one call of the
compiled kernels), `inference.cpu.decoder` (op by op) and `inference.gpu.decoder`.

Kernels multiply what they are given, and a head too many would be read from after a tensor's end:
so `check_shapes` compares a checkpoint's tensors with what its config.json describes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Generic, Self

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.block_layers import EMBEDDING, FINAL_NORM, HEAD, role_of, split_name
from formats.families.family import LatentAttention
from formats.families.registry import block_names
from formats.families.sizes import LatentSizes
from formats.memory import release_freed_memory
from inference.models.config import ModelConfig
from inference.models.layers import L, LayerFactory, X
from inference.models.parts import Layer, PartLoader, with_divided_input
from inference.models.read import dequantized, read_linear

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Decoder(Generic[L, X]):
    """A loaded decoder.

    Args:
        factory: The backend that it will run on: makes its layers.
        longest: Most tokens that a request may have; default: as many as the model has positions.
        config: Its shape, where the checkpoint is a part of one that was checked as a whole;
            default: that of the checkpoint, which is checked.

    Attributes:
        embedding: [vocabulary, hidden], as stored, or the head's where it is tied and held as such;
            None where a quantized head is the embedding, too (`embed`).
        layers: Its blocks.
        norm: [hidden], before the head.
        head: Gives the logits.
        sink_tokens: Positions from the first on whose tokens have static input scales of their own.
        query_growth: fp32 [longest], what q is multiplied by at each position beside
            `config.scale`; None where that is 1.

    Raises:
        CheckpointError: it is not a decoder of this kind, or tensors are missing.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        factory: LayerFactory[L, X],
        longest: int | None = None,
        config: ModelConfig | None = None,
    ) -> None:
        if config is None:
            config = ModelConfig.of(checkpoint.config)
            check_shapes(checkpoint, config)
        self.config = config
        factory.check(config)
        self._checkpoint, self._factory, self.dtype = checkpoint, factory, factory.dtype
        self.sink_tokens = checkpoint.sinks.tokens if checkpoint.sinks.scales else 0
        parts = PartLoader(checkpoint, config, factory)
        own = f"{HEAD}.weight" in checkpoint or HEAD in checkpoint.quantized_modules
        tied = config.tied and not own
        scaled = partial(with_divided_input, divisor=config.logits_divisor)
        self.head = parts.linear(EMBEDDING if tied else HEAD, fold=scaled)
        self.norm = parts.vector(FINAL_NORM, config.logits_divisor)
        self.layers: list[Layer[L, X]] = []
        longest, device = longest or config.max_positions, factory.device
        turns = {own: own.table(longest, config.head_dim, device) for own in set(config.rotary)}
        for block, rotary in zip(block_names(checkpoint.config), config.rotary, strict=True):
            self.layers.append(parts.layer(block, *turns[rotary]))
            release_freed_memory()  # else what packing leaves allocated may add up
        growth = None if config.growth is None else config.growth.table(longest)
        self.query_growth = None if growth is None else growth.to(device)
        # Last: nothing is held any more of what was held beside the packed layers.
        self.embedding = self._embedding(parts, tied=tied)

    def with_layers(self, layers: Sequence[Layer[L, X]]) -> Self:
        """This decoder with other blocks, as many and of the same shape."""
        assert len(layers) == len(self.layers)
        other = copy.copy(self)
        other.layers = list(layers)
        return other

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        table = self.embedding
        embedding = 0 if table is None or table is self.head.matrix else table.nbytes
        return embedding + self.head.nbytes + sum(layer.nbytes for layer in self.layers)

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states before the first block, unscaled: [T, hidden] of ids int64 [T]."""
        if self.embedding is None:
            return self.head.gather(ids, self.dtype)
        return self.embedding[ids].to(self.dtype)

    def _embedding(self, parts: PartLoader[L, X], *, tied: bool) -> Tensor | None:
        if self._checkpoint.shares_head:
            if self.head.gathers:  # else its layout gives no rows
                return None
            stored = read_linear(self._checkpoint, [HEAD], self._factory.device)
            return dequantized(stored).to(self.dtype)
        shared = self.head.matrix if tied else None
        if shared is not None:
            return shared
        own = parts.finite(f"{EMBEDDING}.weight").to(self._factory.device)
        return own if own.dtype in FLOATS else own.to(self.dtype)


Shape = tuple[int, ...]


def check_shapes(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Compare the shapes of a decoder's weights, norms and biases with its configuration.

    Raises:
        CheckpointError: one differs; it is named. Missing tensors are named by who reads them.
    """
    names = (name.rpartition(".") for name in checkpoint.names())
    for module in sorted({m for m, _, leaf in names if leaf in ("weight", "weight_packed")}):
        found = checkpoint.weight_shape(module)
        wanted = _wanted(checkpoint, config, module)
        if wanted is not None and found != wanted:
            raise _mismatch(f"{module}.weight", found, wanted)
        bias = f"{module}.bias"
        if bias in checkpoint and checkpoint.shape(bias) != found[:1]:
            raise _mismatch(bias, checkpoint.shape(bias), found[:1])


def _wanted(checkpoint: Checkpoint, config: ModelConfig, module: str) -> Shape | None:
    """Shape of a module's weight; None where the configuration does not say it."""
    hidden, queries = config.hidden_size, config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    if module in (EMBEDDING, HEAD):
        return config.vocab_size, hidden
    if module == FINAL_NORM:
        return (hidden,)
    parts = split_name(module)
    if parts is None:
        return None
    attention, norms = config.family.attention, config.family.norms
    leaf = parts[2]
    if leaf in (*norms.before, *norms.after):
        return (hidden,)
    if isinstance(attention, LatentAttention):
        assert config.latent is not None
        own = _of_latent(attention, config.latent, hidden).get(leaf)
        return own or _of_feed_forward(checkpoint, config, module)
    if leaf in (attention.q_norm, attention.k_norm) and config.qk_norm != "none":
        whole = queries if leaf == attention.q_norm else keys
        return (config.head_dim if config.qk_norm == "head" else whole,)
    rows = {"q": queries, "k": keys, "v": keys}
    match role_of(module):
        case "q" | "k" | "v" as role:
            return rows[role], hidden
        case "o":
            return hidden, queries
    return _of_feed_forward(checkpoint, config, module)


def _of_latent(names: LatentAttention, sizes: LatentSizes, hidden: int) -> dict[str, Shape]:
    """Shapes of the weights of latent attention, by the names of its parts."""
    queries, rank = sizes.heads * (sizes.plain + sizes.rotated), sizes.query_rank or 0
    return {
        names.q: (queries, hidden),
        names.q_a: (rank, hidden),
        names.q_norm: (rank,),
        names.q_b: (queries, rank),
        names.kv_a: (sizes.rank + sizes.rotated, hidden),
        names.kv_norm: (sizes.rank,),
        names.kv_b: (sizes.heads * (sizes.plain + sizes.value), sizes.rank),
        names.o: (hidden, sizes.heads * sizes.value),
    }


def _of_feed_forward(checkpoint: Checkpoint, config: ModelConfig, module: str) -> Shape | None:
    match role_of(module):
        case "gate" | "up":
            return *checkpoint.weight_shape(module)[:1], config.hidden_size
        case "down":
            return config.hidden_size, *_gate_rows(checkpoint, config, module)
    return None


def _gate_rows(checkpoint: Checkpoint, config: ModelConfig, down: str) -> Shape:
    """Outputs of the gate and up projections whose product a down projection reads."""
    parent, _, leaf = down.rpartition(".")
    kind = next(kind for kind in config.family.feed_forwards if kind.down == leaf)
    gate, up = (checkpoint.weight_shape(f"{parent}.{name}") for name in kind.gate_up)
    if gate != up:
        raise _mismatch(f"{parent}.{kind.up}.weight", up, gate)
    return gate[:1]


def _mismatch(name: str, found: Shape, wanted: Shape) -> CheckpointError:
    return CheckpointError(
        f"{name} has shape {list(found)}; by config.json it is {list(wanted)}. The checkpoint and "
        "its config.json do not belong together; copy both again"
    )
