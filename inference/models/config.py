"""The shape of a decoder, from config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.family import Family, heads_of, needed
from formats.families.registry import family_of
from inference.models.model import KVHeads
from inference.models.rotary import Rotary, read_rotary

NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)  # transformers has defaults for them, which are another model's


def transformers_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """A config.json as transformers reads it.

    Raises:
        CheckpointError: transformers refuses a value.
    """
    raw = dict(values)
    try:
        return AutoConfig.for_model(raw.pop("model_type"), **raw)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"config.json: transformers refuses it ({reason}). Correct it, or copy that of the "
            "original model"
        ) from error


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
    """Shape of a decoder.

    Attributes:
        family: The declaration of its family: names, norms, attention and feed-forward kinds.
        windows: Sliding window of each layer, None for full attention.
        rotary: Rotary embedding of q and k.
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
    windows: tuple[int | None, ...]
    rotary: Rotary
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
        return (KVHeads(self.kv_heads, self.head_dim, self.head_dim),) * self.layers

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> ModelConfig:
        """Read and check a checkpoint's configuration.

        Raises:
            CheckpointError: the family, activation or rotary embedding is not supported, or a
                value is missing or none.
        """
        family = family_of(checkpoint.config)
        for key in NEEDED if family.mixture is None else (*NEEDED, "num_experts_per_tok"):
            needed(checkpoint.config, key)
        config = transformers_config(checkpoint.config)
        if config.hidden_act != "silu":
            raise CheckpointError(f"hidden_act {config.hidden_act!r} is not run here, only silu")
        heads = heads_of(config.to_dict())
        return cls(
            family=family,
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            heads=heads.query,
            kv_heads=heads.kv,
            head_dim=heads.size,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            eps=config.rms_norm_eps,
            windows=_windows(config),
            rotary=read_rotary(family, config),
            routing=_routing(family, config),
            tied=config.tie_word_embeddings,
        )


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None) or None
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # all or none
        return (window,) * count
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
