"""The shape of a decoder, from config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from transformers import PretrainedConfig

from formats.errors import CheckpointError
from formats.families.family import Family, LatentAttention, QKNorm
from formats.families.registry import family_of
from formats.families.sizes import LatentSizes, heads_of, latent_sizes, needed, rotary_order
from formats.modeling.config import transformers_config
from formats.modeling.rotary import Growth, Rotary, read_growth, read_rotary
from inference.models.model import KVHeads
from kernels.op_inputs import Activation, Clamped

NEEDED = (  # transformers has defaults for them, which are another model's
    "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size "
    "max_position_embeddings"
).split()
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # by transformers' names


@dataclass(frozen=True)
class Routing:
    """How a family's routers choose; see `formats.families.family.Mixture`.

    Attributes:
        experts: How many there are in a block.
        chosen: How many of them a token goes to.
        normalized: Whether the scores of these are divided by their sum.
        scores: What makes an expert's score of its logit.
        groups: How many groups of neighbours the experts are in.
        chosen_groups: Of how many of them a token's experts are.
        best_of_group: How many of a group's best scores are added up to its own.
        factor: Of the chosen experts' weights.
    """

    experts: int
    chosen: int
    normalized: bool
    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    chosen_groups: int = 1
    best_of_group: int = 1
    factor: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder, and the numbers that its layers compute with.

    A factor m of what the sub-layers add is in none of their weights: the residual stream is held
    divided by it. Then nothing is multiplied, as RMSNorms do not see how long their input is, but
    for what they add to its mean square, which becomes eps / m^2.

    Attributes:
        family: The declaration of its family: names, norms, attention and feed-forward kinds.
        eps: What all RMSNorms add to the mean square.
        activation: Of the feed-forward layers: silu, GELU, or GELU by its approximation by tanh
            (Hendrycks and Gimpel 2016, arXiv 1606.08415).
        expert_activation: Of experts, which may be another.
        scale: Factor of q k^T.
        softcap: Bound c of attention's logits, c tanh(x / c), or None.
        embedding_scale: Factor of the embedding's rows.
        logits_divisor: What the logits are divided by; the last norm's weight holds it.
        logits_softcap: Bound c of the logits, c tanh(x / c), or None.
        windows: Sliding window of each layer, None for full attention.
        qk_norm: Whether q and k pass norms before they turn: of each head, or of all together.
        rotary: Rotary embedding of q and k, of each layer; equal ones are one object.
        growth: How q grows with its position, or None.
        channels: Channels of a head of q and k as they are held, by their places as they
            are stored; None where they are alike.
        latent: Sizes of latent attention; None of other attention. `head_dim` is then that of what
            turns of a head of q and k, and `kv_heads` one.
        routing: How experts are chosen; None for dense families.
        tied: Whether the embedding is the head's weight, if there is no other.
    """

    family: Family
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    eps: float
    activation: Activation
    expert_activation: Activation
    scale: float
    softcap: float | None
    embedding_scale: float
    logits_divisor: float
    logits_softcap: float | None
    windows: tuple[int | None, ...]
    qk_norm: QKNorm
    rotary: tuple[Rotary, ...]
    growth: Growth | None
    channels: tuple[int, ...] | None
    latent: LatentSizes | None
    routing: Routing | None
    tied: bool

    @property
    def attention_span(self) -> float:
        """Tokens in the cache for which attention takes as long as all else, roughly.

        A block's linear layers have about 12 H^2 weights, and attention multiplies 2 H numbers for
        each token in the cache, about half as fast as integers: they are equal at 3 H tokens.
        """
        full = sum(window is None for window in self.windows)
        return 3 * self.hidden_size * self.layers / full if full else math.inf

    @property
    def cached(self) -> tuple[KVHeads, ...]:
        """What the cache holds of a token, layer by layer."""
        heads = KVHeads(self.kv_heads, self.head_dim, self.head_dim, self.channels)
        if self.latent is not None:  # calibration sees its keys in the order in which they run
            heads = KVHeads(1, self.latent.rotated, self.latent.rank, latent=True)
        return (heads,) * self.layers

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ModelConfig:
        """Read and check a configuration, as config.json has it.

        Raises:
            CheckpointError: the family, activation or rotary embedding is not supported, or a
                value is missing or none.
        """
        family = family_of(settings)
        for key in _needed(family):
            needed(settings, key)
        config = transformers_config(settings)
        if getattr(config, "use_bidirectional_attention", False):
            raise CheckpointError(
                "config.json: use_bidirectional_attention is true. Models whose tokens see later "
                "ones do not generate text token by token, and are not run"
            )
        latent = None
        if isinstance(family.attention, LatentAttention):
            latent = latent_sizes(config.to_dict())
        heads, factors = heads_of(config.to_dict()), family.multipliers
        order = rotary_order(family, config.to_dict())
        residual = _number(config, factors.residual) or 1.0
        return cls(
            family=family,
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            heads=heads.query,
            kv_heads=heads.kv if latent is None else 1,
            head_dim=heads.size,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            eps=getattr(config, family.norms.eps_setting) / residual**2,
            activation=_activation(family, config),
            expert_activation=_expert_activation(family, config),
            scale=_scale(family, config, heads.size, latent),
            softcap=_number(config, family.attention.softcap_setting),
            embedding_scale=_embedding_scale(family, config) / residual,
            logits_divisor=_number(config, factors.logits) or 1.0,
            logits_softcap=_number(config, factors.logits_softcap),
            windows=_windows(config),
            qk_norm=_qk_norm(family, config),
            rotary=read_rotary(family, config),
            growth=read_growth(family, config),
            channels=None if order == sorted(order) else tuple(order),
            latent=latent,
            routing=_routing(family, config),
            tied=config.tie_word_embeddings,
        )


def _needed(family: Family) -> tuple[str, ...]:
    """Keys of config.json whose defaults are those of another model."""
    scale, mixture = family.attention.scale, ("num_experts_per_tok",)
    return (
        *NEEDED,
        family.norms.eps_setting,
        *(() if scale == "head_size" else scale[:1]),
        *(() if family.mixture is None else mixture),
    )


def _number(config: PretrainedConfig, key: str | None) -> float | None:
    """A number of the configuration; None where it has none, or the family no key for it."""
    value = None if key is None else getattr(config, key)
    return None if value is None else float(value)


def _activation(family: Family, config: PretrainedConfig) -> Activation:
    setting = family.feed_forward.activation_setting
    found = ACTIVATIONS.get(getattr(config, setting))
    if found is None:
        raise CheckpointError(
            f"{setting} {getattr(config, setting)!r} is not run here; supported are "
            f"{', '.join(ACTIVATIONS)}"
        )
    return found


def _expert_activation(family: Family, config: PretrainedConfig) -> Activation:
    names = family.mixture
    if names is None or names.clamped is None:
        return _activation(family, config)
    slope, bound = (float(getattr(config, key, usual)) for key, usual in names.clamped)
    return Clamped(slope, bound)


def _scale(
    family: Family, config: PretrainedConfig, head_dim: int, latent: LatentSizes | None
) -> float:
    if latent is not None:
        return _latent_scale(latent, config.rope_parameters or {})
    scale = family.attention.scale
    if scale == "head_size":
        return head_dim**-0.5
    key, power = scale
    return float(getattr(config, key)) ** power


def _latent_scale(sizes: LatentSizes, rotation: Mapping[str, Any]) -> float:
    """By the size of a head of q; YaRN multiplies it for both (arXiv 2309.00071, section 3.4).

    The factor is (0.1 m ln s + 1)^2, m `mscale_all_dim`, s the factor of the positions.
    """
    own, kind = (sizes.plain + sizes.rotated) ** -0.5, rotation.get("rope_type", "default")
    strength, factor = rotation.get("mscale_all_dim"), rotation.get("factor") or 1.0
    if kind == "default" or not strength or factor <= 1:
        return own
    return own * (0.1 * strength * math.log(factor) + 1.0) ** 2


def _qk_norm(family: Family, config: PretrainedConfig) -> QKNorm:
    setting = family.attention.qk_norm_setting
    there = setting is None or getattr(config, setting)
    return family.attention.qk_norm if there else "none"


def _embedding_scale(family: Family, config: PretrainedConfig) -> float:
    key = family.multipliers.embedding
    return config.hidden_size**0.5 if key == "sqrt_hidden_size" else _number(config, key) or 1.0


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None) or None
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # all or none
        return (window,) * count
    others = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if others or len(kinds) != count:
        raise CheckpointError(
            f"config.json: layer_types has {len(kinds)} values for {count} layers, of the kinds "
            f"{', '.join(dict.fromkeys(kinds))}; run are full_attention and sliding_attention, one "
            "for each layer"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _routing(family: Family, config: PretrainedConfig) -> Routing | None:
    """How experts are chosen.

    Raises:
        CheckpointError: groups do not divide the experts, or hold too few to choose from.
    """
    names = family.mixture
    if names is None:
        return None
    normalized = names.normalized
    routing = Routing(
        experts=getattr(config, names.count),
        chosen=config.num_experts_per_tok,
        normalized=normalized if isinstance(normalized, bool) else getattr(config, normalized),
        scores=names.scores,
        factor=1.0 if names.factor is None else getattr(config, names.factor),
    )
    groups = names.groups
    if groups is None or (
        groups.only_if and getattr(config, groups.only_if[0]) != groups.only_if[1]
    ):
        return routing
    count, chosen = getattr(config, groups.count), getattr(config, groups.chosen)
    size, uneven = divmod(routing.experts, count)
    if uneven or size < groups.best or not routing.chosen <= chosen * size <= routing.experts:
        raise CheckpointError(
            f"config.json: {routing.chosen} of {routing.experts} experts are to be chosen from "
            f"{chosen} ({groups.chosen}) of {count} groups ({groups.count}), which does not come "
            "out even. Correct it, or copy config.json of the original model"
        )
    return replace(routing, groups=count, chosen_groups=chosen, best_of_group=groups.best)
