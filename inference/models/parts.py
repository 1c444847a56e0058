"""The parts of a decoder as they are loaded: its blocks, and what stands before and after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic

from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.families.family import LatentAttention
from inference.models.channel_order import held_heads, held_rows
from inference.models.config import ModelConfig
from inference.models.feed_forward import FeedForward, load_feed_forward
from inference.models.latent import LatentProjections, load_latent
from inference.models.layers import L, LayerFactory, X
from inference.models.read import StoredLinear, finite, read_linear


@dataclass(frozen=True)
class Layer(Generic[L, X]):
    """Weights of one decoder block.

    Norms' weights are as they multiply (1 + w where a family's norms do so), and the channels of
    each head of q and k are ordered as rotation in two halves wants them
    (`inference.models.channel_order`).

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


class PartLoader(Generic[L, X]):
    """Loads parts of a decoder.

    Args:
        config: The shape that they have.
        factory: The backend that they will run on: makes their layers.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, factory: LayerFactory[L, X]
    ) -> None:
        self._checkpoint, self._config, self._factory = checkpoint, config, factory

    def linear(
        self, *modules: str, fold: Callable[[StoredLinear], StoredLinear] = lambda stored: stored
    ) -> L:
        """Linear layers that run as one; what was read of them is held by nobody else."""
        factory = self._factory
        return factory.linear(fold(read_linear(self._checkpoint, modules, factory.device)))

    def vector(self, norm: str, divisor: float = 1.0) -> Tensor:
        """Weight of a norm as it multiplies; fp32 where that is not what is stored."""
        weight, offset = self.finite(f"{norm}.weight"), self._config.family.norms.offset
        if not offset and divisor == 1:
            return weight.to(self._factory.device, self._factory.dtype)
        return ((weight.float() + offset) / divisor).to(self._factory.device)

    def _sinks(self, name: str) -> Tensor:
        return self.finite(name).float().to(self._factory.device)

    def finite(self, name: str) -> Tensor:
        """As `inference.models.read.finite`."""
        return finite(self._checkpoint, name)

    def layer(self, block: str, cos: Tensor, sin: Tensor) -> Layer[L, X]:
        """A decoder block, by its full name; it turns q and k by cos and sin [longest, D]."""
        config = self._config
        names, norms = config.family.attention, config.family.norms
        attention = f"{block}.{names.module}"

        def norm(name: str | None) -> Tensor | None:
            return None if name is None else self.vector(f"{block}.{name}")

        def head_norm(name: str) -> Tensor | None:
            if config.qk_norm == "none":
                return None
            return held_rows(self.vector(f"{attention}.{name}"), config.channels)

        if isinstance(names, LatentAttention):
            assert config.latent is not None
            qkv, latent = load_latent(
                self._checkpoint, attention, names, config.latent, config.channels, self._factory
            )
            q_norm = k_norm = None
        else:
            heads = config.heads + config.kv_heads
            turning = partial(held_heads, heads=heads, channels=config.channels)
            qkv = self.linear(*(f"{attention}.{part}" for part in names.qkv), fold=turning)
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
            o=self.linear(f"{attention}.{names.o}"),
            after_attention=norm(norms.after_attention),
            before_feed_forward=norm(norms.before_feed_forward),
            after_feed_forward=norm(norms.after_feed_forward),
            feed_forward=load_feed_forward(self._checkpoint, block, config, self._factory),
        )
