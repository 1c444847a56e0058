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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.attention import LatentAttention
from formats.families.names import EMBEDDING, FINAL_NORM, HEAD
from formats.families.registry import block_names
from formats.memory import release_freed_memory
from inference.models.config import ModelConfig
from inference.models.feed_forward import FeedForward, load_feed_forward
from inference.models.fold import held_heads, held_norm, with_divided_input
from inference.models.latent import LatentProjections, load_latent
from inference.models.layers import L, LayerFactory, X
from inference.models.read import StoredLinear, read_linear
from inference.models.shapes import check_shapes


@dataclass(frozen=True)
class Layer(Generic[L, X]):
    """Weights of one decoder block.

    Norms' weights are as they multiply (1 + w where a family's norms do so), and the channels of
    each head of q and k lie as rotation in two halves wants them (`inference.models.fold`).

    Attributes:
        cos: fp32 [longest, D], of the rotation of q and k; shared by the layers that turn alike.
        sin: fp32 [longest, D].
        before_attention: Weight of the norm of what attention reads [H], if there is one.
        qkv: All that reads what attention reads, merged: q, k and v, or of latent attention q, or
            its latent, and what is cached.
        q_norm: Weight of the norm of q before its rotation: of each head [D], or of the whole
            projection [Hq D]; None without one.
        k_norm: The same of k, [D] or [Hkv D].
        sinks: fp32 [Hq], a logit of each query head that has no value (`AttentionInputs`), or None.
        o: Attention's output projection.
        after_attention: Weight of the norm of what attention adds [H], if there is one.
        before_feed_forward: Weight of the norm of what the feed-forward layer reads, if any.
        latent: The rest of latent attention's projections; None of other attention.
        feed_forward: The feed-forward layer.
        after_feed_forward: Weight of the norm of what it adds, if there is one.
    """

    cos: Tensor
    sin: Tensor
    before_attention: Tensor | None
    qkv: L
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    o: L
    after_attention: Tensor | None
    before_feed_forward: Tensor | None
    after_feed_forward: Tensor | None
    feed_forward: FeedForward[L, X]
    latent: LatentProjections[L] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its linear layers."""
        latent = 0 if self.latent is None else self.latent.nbytes
        return self.qkv.nbytes + self.o.nbytes + latent + self.feed_forward.nbytes


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
        query_growth: fp32 [longest], what q is multiplied by at each position beside
            `config.scale`; None where that is 1.

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
        scaled = partial(with_divided_input, divisor=config.logits_divisor)
        self.head = self._linear(EMBEDDING if tied else HEAD, fold=scaled)
        self.norm = self._vector(FINAL_NORM, config.logits_divisor)
        self.layers: list[Layer[L, X]] = []
        longest, device = longest or config.max_positions, factory.device
        turns = {own: own.table(longest, config.head_dim, device) for own in set(config.rotary)}
        for block, rotary in zip(block_names(checkpoint.config), config.rotary, strict=True):
            self.layers.append(self._load_layer(block, *turns[rotary]))
            release_freed_memory()  # else what packing a layer leaves behind may add up
        growth = None if config.growth is None else config.growth.table(longest)
        self.query_growth = None if growth is None else growth.to(device)
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

    def _linear(
        self, *modules: str, fold: Callable[[StoredLinear], StoredLinear] = lambda stored: stored
    ) -> L:
        """Linear layers that run as one; what was read of them is held by nobody else."""
        factory = self._factory
        return factory.linear(fold(read_linear(self._checkpoint, modules, factory.device)))

    def _vector(self, norm: str, divisor: float = 1.0) -> Tensor:
        """Weight of a norm as it multiplies; fp32 where that is not what is stored."""
        weight, offset = self._finite(f"{norm}.weight"), self.config.family.norms.offset
        if not offset and divisor == 1:
            return weight.to(self._factory.device, self.dtype)
        return ((weight.float() + offset) / divisor).to(self._factory.device)

    def _sinks(self, name: str) -> Tensor:
        return self._finite(name).float().to(self._factory.device)

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

    def _load_layer(self, block: str, cos: Tensor, sin: Tensor) -> Layer[L, X]:
        config = self.config
        names, norms = config.family.attention, config.family.norms
        attention = f"{block}.{names.module}"

        def norm(name: str | None) -> Tensor | None:
            return None if name is None else self._vector(f"{block}.{name}")

        def head_norm(name: str) -> Tensor | None:
            if config.qk_norm == "none":
                return None
            return held_norm(self._vector(f"{attention}.{name}"), config.channels)

        if isinstance(names, LatentAttention):
            assert config.latent is not None
            qkv, latent = load_latent(
                self._checkpoint, attention, names, config.latent, config.channels, self._factory
            )
            q_norm = k_norm = None
        else:
            heads = config.heads + config.kv_heads
            turning = partial(held_heads, heads=heads, channels=config.channels)
            qkv = self._linear(*(f"{attention}.{part}" for part in names.qkv), fold=turning)
            q_norm, k_norm, latent = head_norm(names.q_norm), head_norm(names.k_norm), None
        return Layer(
            cos=cos,
            sin=sin,
            before_attention=norm(norms.before_attention),
            qkv=qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            latent=latent,
            sinks=self._sinks(f"{attention}.{names.sinks}") if names.sinks else None,
            o=self._linear(f"{attention}.{names.o}"),
            after_attention=norm(norms.after_attention),
            before_feed_forward=norm(norms.before_feed_forward),
            after_feed_forward=norm(norms.after_feed_forward),
            feed_forward=load_feed_forward(self._checkpoint, block, config, self._factory),
        )
