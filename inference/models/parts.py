"""The parts of a decoder as they are loaded: its blocks, and what stands before and after them.

The channels of q and k are put in the order in which they run where they are read. Rotation turns
pairs of channels i and i + D / 2 of a whole head (`formats.modeling.rotary`). Heads that are stored
otherwise - pairs side by side, turning channels before those that do not - have their channels put
in that order: the rows of q and k with their scales, zero points and biases, the weights of norms
over heads or whole projections, and the scales of K's channels in the cache. q and k have one
order, so that their products do not change; V and what reads it stay as they are. Nothing that runs
them has to know of it.

Of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1.2) the projection from the latent to
keys is multiplied with queries, that to values with what attention gives, so that attention sees
latents alone. They are held as floats, whatever they are stored as: [heads, channels, R] products
take no scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.family import LatentAttention, Mixture
from formats.families.sizes import LatentSizes
from inference.models.config import ModelConfig, Routing
from inference.models.layers import FeedForward, GatedMLP, L, LayerFactory, MixtureOfExperts, X
from inference.models.read import StoredLinear, dequantized, finite, read_linear, read_stacks

Channels = tuple[int, ...] | None


@dataclass(frozen=True)
class LatentProjections(Generic[L]):
    """What stands between the layers that read attention's input and the cache, and after it.

    Attributes:
        q_norm: Weight of the norm of the queries' latent [Rq]; None where q is one projection.
        q_b: Makes queries [heads (plain + rotated)] of it, or None.
        kv_norm: Weight of the latent's norm [R].
        up_k: W^UK of each head: [heads, plain, R].
        up_v: W^UV of each head, transposed: [heads, R, value].
    """

    q_norm: Tensor | None
    q_b: L | None
    kv_norm: Tensor
    up_k: Tensor
    up_v: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of its linear layers."""
        own = self.up_k.nbytes + self.up_v.nbytes
        return own if self.q_b is None else own + self.q_b.nbytes


@dataclass(frozen=True)
class Layer(Generic[L, X]):
    """Weights of one decoder block.

    Norms' weights are as they multiply (1 + w where a family's norms do so), and the channels of
    each head of q and k are ordered as rotation in two halves wants them.

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
        return self._factory.linear(fold(self._read(*modules)))

    def _read(self, *modules: str) -> StoredLinear:
        return read_linear(self._checkpoint, modules, self._factory.device)

    def vector(self, norm: str, divisor: float = 1.0) -> Tensor:
        """Weight of a norm as it multiplies; fp32 where that is not what is stored."""
        weight, offset = self.finite(f"{norm}.weight"), self._config.family.norms.offset
        if not offset and divisor == 1:
            return weight.to(self._factory.device, self._factory.dtype)
        return ((weight.float() + offset) / divisor).to(self._factory.device)

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
            qkv, latent = self._latent(attention, names, config.latent)
            q_norm = k_norm = None
        else:
            heads = config.heads + config.kv_heads
            turning = partial(held_heads, heads=heads, channels=config.channels)
            qkv = self.linear(*(f"{attention}.{part}" for part in names.qkv), fold=turning)
            q_norm, k_norm, latent = head_norm(names.q_norm), head_norm(names.k_norm), None
        sinks = self.finite(f"{attention}.{names.sinks}").float() if names.sinks else None
        return Layer(
            cos=cos,
            sin=sin,
            before_attention=norm(norms.before_attention),
            qkv=qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            latent=latent,
            sinks=None if sinks is None else sinks.to(self._factory.device),
            o=self.linear(f"{attention}.{names.o}"),
            after_attention=norm(norms.after_attention),
            before_feed_forward=norm(norms.before_feed_forward),
            after_feed_forward=norm(norms.after_feed_forward),
            feed_forward=self._feed_forward(block),
        )

    def _latent(
        self, attention: str, names: LatentAttention, sizes: LatentSizes
    ) -> tuple[L, LatentProjections[L]]:
        """The layer of all that reads the input of an attention module (q, or its latent, then the
        latent of keys and values and the rotated key), and the rest of its projections."""

        def vector(name: str) -> Tensor:
            own = self.finite(f"{attention}.{name}.weight")
            return own.to(self._factory.device, self._factory.dtype)

        channels, split = self._config.channels, sizes.query_rank is not None
        first = names.q_a if split else names.q
        inputs = self._read(*(f"{attention}.{name}" for name in (first, names.kv_a)))
        queries = _query_rows(sizes, channels)
        turned = list(range(sizes.query_rank or 0)) if split else list(queries)
        order, start = channels or tuple(range(sizes.rotated)), len(turned)
        turned += [start + i for i in (*range(sizes.rank), *(sizes.rank + c for c in order))]
        up = dequantized(self._read(f"{attention}.{names.kv_b}")).to(self._factory.dtype)
        up_k, up_v = up.view(sizes.heads, -1, sizes.rank).split([sizes.plain, sizes.value], dim=1)
        q_b = None
        if split:
            q_b = self.linear(f"{attention}.{names.q_b}", fold=partial(with_rows, rows=queries))
        return self._factory.linear(with_rows(inputs, turned)), LatentProjections(
            q_norm=vector(names.q_norm) if split else None,
            q_b=q_b,
            kv_norm=vector(names.kv_norm),
            up_k=up_k.contiguous(),
            up_v=up_v.transpose(1, 2).contiguous(),
        )

    def _feed_forward(self, block: str) -> FeedForward[L, X]:
        """The feed-forward layer of a block; it is a mixture if the checkpoint has its router."""
        names, routing = self._config.family.mixture, self._config.routing
        if names is not None and routing is not None:  # these families have dense blocks too
            moe = f"{block}.{names.module}"
            if f"{moe}.{names.router}.weight" in self._checkpoint:
                return self._mixture(moe, names, routing)
        return self._gated(f"{block}.mlp")

    def _gated(self, module: str) -> GatedMLP[L]:
        names = self._config.family.feed_forward
        gate_up = self.linear(*(f"{module}.{leaf}" for leaf in names.gate_up))
        return GatedMLP(gate_up, self.linear(f"{module}.{names.down}"), self._config.activation)

    def _mixture(self, moe: str, names: Mixture, routing: Routing) -> MixtureOfExperts[L, X]:
        """A mixture of experts.

        Raises:
            CheckpointError: a tensor is missing, or the router is not one of these experts.
        """
        checkpoint, factory, router = self._checkpoint, self._factory, f"{moe}.{names.router}"
        count = checkpoint.shape(f"{router}.weight")[0]
        if count != routing.experts:
            raise CheckpointError(
                f"{router} chooses among {count} experts, config.json says {routing.experts}. The "
                "checkpoint and its config.json do not belong together"
            )

        def experts(*leaves: str) -> X:
            modules = [[f"{moe}.experts.{i}.{leaf}" for leaf in leaves] for i in range(count)]
            return factory.experts(read_stacks(checkpoint, modules, factory.device), count)

        shared, shared_gate = f"{moe}.{names.shared}", f"{moe}.{names.shared_gate}"
        has_gate = names.shared_gate is not None and f"{shared_gate}.weight" in checkpoint
        has_shared = has_gate if names.shared_gate else names.shared is not None
        correction = None
        if names.correction is not None:
            correction = checkpoint.tensor(f"{router}.{names.correction}").float()
        return MixtureOfExperts(
            routing=routing,
            gate_up=experts(*names.expert.gate_up),
            down=experts(names.expert.down),
            router=self.linear(router),
            shared=self._gated(shared) if has_shared else None,
            shared_gate=self.linear(shared_gate) if has_gate else None,
            activation=self._config.expert_activation,
            correction=None if correction is None else correction.to(factory.device),
        )


def _query_rows(sizes: LatentSizes, channels: Channels) -> list[int]:
    """Rows of a projection to queries, so that what turns together is in two halves."""
    head = [*range(sizes.plain), *(sizes.plain + c for c in channels or range(sizes.rotated))]
    return [h * len(head) + row for h in range(sizes.heads) for row in head]


def held_heads(stored: StoredLinear, heads: int, channels: Channels) -> StoredLinear:
    """A layer that makes q, k and v with the channels of q and k in the order in which they run.

    Args:
        stored: q, k and v merged: [(Hq + 2 Hkv) D, K].
        heads: Hq + Hkv.
        channels: Places of the channels as they are stored; None where nothing moves.
    """
    if channels is None:
        return stored
    rows = torch.arange(len(stored.weight), device=stored.weight.device)
    turning = rows[: heads * len(channels)].view(heads, -1)
    turning.copy_(turning[:, channels])
    return with_rows(stored, rows)


def with_rows(stored: StoredLinear, rows: Tensor | Sequence[int]) -> StoredLinear:
    """A layer with its outputs in another order: the places they have as they are stored."""
    index = torch.as_tensor(rows, device=stored.weight.device)
    if bool((index == torch.arange(len(index), device=index.device)).all()):
        return stored
    taken = (stored.weight, stored.scale, stored.zero_point, stored.bias)
    weight, scale, zero_point, bias = (None if t is None else _rows(t, index) for t in taken)
    assert weight is not None
    return replace(stored, weight=weight, scale=scale, zero_point=zero_point, bias=bias)


def held_rows(rows: Tensor, channels: Channels) -> Tensor:
    """Rows [heads D, ...] of q or k, or of the weight of a norm of one head or of all, in the same
    order."""
    if channels is None:
        return rows
    return rows.unflatten(0, (-1, len(channels)))[:, channels].flatten(0, 1)


def held_scales(
    pair: tuple[Tensor, Tensor] | None, channels: Channels
) -> tuple[Tensor, Tensor] | None:
    """Static scales of K and V: those of K's channels [Hkv, D], if it has any, in that order."""
    if pair is None or channels is None or pair[0].dim() < 2:
        return pair
    return pair[0][:, channels], pair[1]


def with_divided_input(stored: StoredLinear, divisor: float) -> StoredLinear:
    """A layer whose input comes divided by a number, which a static scale of it has to be too."""
    if stored.input_scale is None or divisor == 1:
        return stored
    sinks = None if stored.sink_scale is None else stored.sink_scale / divisor
    return replace(stored, input_scale=stored.input_scale / divisor, sink_scale=sinks)


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor of any type; e4m3 is moved as bytes."""
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8)[rows].view(tensor.dtype)
    return tensor[rows]
