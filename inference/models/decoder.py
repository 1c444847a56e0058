"""A decoder as its family declares it (`formats.families`), loaded.

    x = x + after(attention(before(x)))        x = x + after(feed_forward(before(x)))

RMSNorms before or after the sub-layers; grouped-query attention (Ainslie et al. 2023) with rotary
embedding and perhaps norms of q and k; gated MLPs or mixtures of them. Biases and routers of
experts are there if the checkpoint has their tensors.

Nothing here runs. Three interpreters read this description: `inference.cpu.fused` (one call of the
compiled kernels), `inference.cpu.decoder` (op by op) and `inference.gpu.decoder`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.names import EMBEDDING, FINAL_NORM, HEAD
from formats.families.registry import block_names
from formats.memory import release_freed_memory
from inference.models.config import ModelConfig
from inference.models.feed_forward import FeedForward, load_feed_forward
from inference.models.layers import L, LayerFactory, X
from inference.models.read import read_linear
from inference.models.shapes import check_shapes


@dataclass(frozen=True)
class Layer(Generic[L, X]):
    """Weights of one decoder block.

    Attributes:
        before_attention: Weight of the norm of what attention reads [H], if there is one.
        qkv: q, k and v merged.
        q_norm: Weight of the norm of q before its rotation: of each head [D], or of the whole
            projection [Hq D]; None without one.
        k_norm: The same of k, [D] or [Hkv D].
        o: Attention's output projection.
        after_attention: Weight of the norm of what attention adds [H], if there is one.
        before_feed_forward: Weight of the norm of what the feed-forward layer reads, if any.
        feed_forward: The feed-forward layer.
        after_feed_forward: Weight of the norm of what it adds, if there is one.
    """

    before_attention: Tensor | None
    qkv: L
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: L
    after_attention: Tensor | None
    before_feed_forward: Tensor | None
    after_feed_forward: Tensor | None
    feed_forward: FeedForward[L, X]

    @property
    def nbytes(self) -> int:
        """Bytes of its linear layers."""
        return self.qkv.nbytes + self.o.nbytes + self.feed_forward.nbytes


class Decoder(Generic[L, X]):
    """A loaded decoder.

    Args:
        checkpoint: Float or quantized.
        factory: The backend that it will run on: makes its layers.
        longest: Most tokens that a request may have; default: as many as the model has positions.

    Attributes:
        config: Its shape.
        dtype: Of activations.
        embedding: [vocabulary, hidden], as stored, or the head's where it is tied and held as such.
        layers: Its blocks.
        norm: [hidden], before the head.
        head: Gives the logits.
        cos: fp32 [longest, R], of the first R channels of each head, which turn.
        sin: fp32 [longest, R].

    Raises:
        CheckpointError: it is not a decoder of this kind, or tensors are missing.
    """

    def __init__(
        self, checkpoint: Checkpoint, factory: LayerFactory[L, X], longest: int | None = None
    ) -> None:
        self.config = config = ModelConfig.from_checkpoint(checkpoint)
        check_shapes(checkpoint, config)
        factory.check(config)
        self._checkpoint, self._factory, self.dtype = checkpoint, factory, factory.dtype
        own = f"{HEAD}.weight" in checkpoint or HEAD in checkpoint.quantized_modules
        tied = config.tied and not own
        self.head = self._linear(EMBEDDING if tied else HEAD)
        self.norm = self._vector(FINAL_NORM)
        self.layers: list[Layer[L, X]] = []
        for block in block_names(checkpoint.config):
            self.layers.append(self._load_layer(block))
            release_freed_memory()  # else what packing a layer leaves behind may add up
        cos, sin = config.rotary.table(longest or config.max_positions)
        self.cos, self.sin = cos.to(factory.device), sin.to(factory.device)
        # Last: nothing is held any more of what was held beside the packed layers.
        self.embedding = self._embedding(tied=tied)

    def with_layers(self, layers: Sequence[Layer[L, X]]) -> Decoder[L, X]:
        """This decoder with other blocks, as many and of the same shape."""
        assert len(layers) == len(self.layers)
        other = copy.copy(self)
        other.layers = list(layers)
        return other

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        embedding = 0 if self.embedding is self.head.matrix else self.embedding.nbytes
        return embedding + self.head.nbytes + sum(layer.nbytes for layer in self.layers)

    def _linear(self, *modules: str) -> L:
        return self._factory.linear(read_linear(self._checkpoint, modules, self._factory.device))

    def _vector(self, norm: str) -> Tensor:
        """Weight of a norm."""
        return self._finite(f"{norm}.weight").to(self._factory.device, self.dtype)

    def _finite(self, name: str) -> Tensor:
        """A tensor whose NaN would be every token's."""
        tensor = self._checkpoint.tensor(name)
        if tensor.numel() and not all(bool(torch.isfinite(end)) for end in tensor.aminmax()):
            raise CheckpointError(
                f"{name} holds NaN or infinity. The checkpoint is damaged; copy or write it again"
            )
        return tensor

    def _embedding(self, *, tied: bool) -> Tensor:
        shared = self.head.matrix if tied else None
        if shared is not None:
            return shared
        own = self._finite(f"{EMBEDDING}.weight").to(self._factory.device)
        return own if own.dtype in (torch.float32, torch.bfloat16) else own.to(self.dtype)

    def _load_layer(self, block: str) -> Layer[L, X]:
        names, norms = self.config.family.attention, self.config.family.norms
        attention, normed = f"{block}.{names.module}", names.qk_norm != "none"

        def norm(name: str | None) -> Tensor | None:
            return None if name is None else self._vector(f"{block}.{name}")

        return Layer(
            before_attention=norm(norms.before_attention),
            qkv=self._linear(*(f"{attention}.{part}" for part in names.qkv)),
            q_norm=self._vector(f"{attention}.{names.q_norm}") if normed else None,
            k_norm=self._vector(f"{attention}.{names.k_norm}") if normed else None,
            o=self._linear(f"{attention}.{names.o}"),
            after_attention=norm(norms.after_attention),
            before_feed_forward=norm(norms.before_feed_forward),
            after_feed_forward=norm(norms.after_feed_forward),
            feed_forward=load_feed_forward(
                self._checkpoint, block, self.config.routing, self._factory
            ),
        )
