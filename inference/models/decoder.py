"""A decoder as its family declares it (`formats.families`), loaded.

    x = x + after(attention(before(x)))        x = x + after(feed_forward(before(x)))

RMSNorms before or after the sub-layers; grouped-query attention (Ainslie et al. 2023) with rotary
embedding and perhaps norms of q and k; gated MLPs or mixtures of them. Biases and routers of
experts are there if the checkpoint has their tensors.

Nothing here runs. Three interpreters read this description: `inference.cpu.loop` (one call of the
compiled kernels), `inference.cpu.decoder` (op by op) and `inference.gpu.decoder`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Generic, Self

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.families.names import EMBEDDING, FINAL_NORM, HEAD
from formats.families.registry import block_names
from formats.memory import release_freed_memory
from inference.models.config import ModelConfig
from inference.models.layers import L, LayerFactory, X
from inference.models.parts import Layer, PartLoader, with_divided_input
from inference.models.read import dequantized, read_linear
from inference.models.shapes import check_shapes

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
