"""The shape of a decoder, from config.json."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import AutoConfig, PretrainedConfig

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.family import Family, heads_of
from formats.families.registry import family_of
from inference.models.rotary import Rotary, read_rotary


@dataclass(frozen=True)
class Routing:
    """How a family's routers choose.

    Attributes:
        experts: How many there are in a block.
        chosen: How many of them a token goes to.
        normalized: Whether the probabilities of these are divided by their sum.
    """

    experts: int
    chosen: int
    normalized: bool


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

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> ModelConfig:
        """Read and check a checkpoint's configuration.

        Raises:
            CheckpointError: the family, activation or rotary embedding is not supported.
        """
        family, raw = family_of(checkpoint.config), dict(checkpoint.config)
        config = AutoConfig.for_model(raw.pop("model_type"), **raw)
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
    window = getattr(config, "sliding_window", None)
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # all or none
        return (window,) * count
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _routing(family: Family, config: PretrainedConfig) -> Routing | None:
    names = family.mixture
    if names is None:
        return None
    normalized = names.normalized
    return Routing(
        experts=getattr(config, names.count),
        chosen=config.num_experts_per_tok,
        normalized=normalized if isinstance(normalized, bool) else getattr(config, normalized),
    )
