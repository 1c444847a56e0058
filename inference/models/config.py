"""The shape of a decoder, from config.json."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.family import Family, heads_of
from formats.families.registry import family_of


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
        windows: Sliding window of each layer, None for full attention.
        inverse_frequency: RoPE's, fp32 [head_dim / 2].
        rope_scaling: Factor of cos and sin (YaRN's), usually 1.
        routing: How experts are chosen; None for dense families.
        tied: Whether the embedding is the head's weight, if there is no other.
    """

    model_type: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    eps: float
    windows: tuple[int | None, ...]
    inverse_frequency: Tensor
    rope_scaling: float
    routing: Routing | None
    tied: bool

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> ModelConfig:
        """Read and check a checkpoint's configuration.

        Raises:
            CheckpointError: the family, activation or rotary embedding is not supported.
        """
        family, raw = family_of(checkpoint.config), dict(checkpoint.config)
        kind = raw.pop("model_type")
        config = AutoConfig.for_model(kind, **raw)
        rope = (config.rope_parameters or {}).get("rope_type", "default")
        if rope not in family.rope_types:
            raise CheckpointError(
                f"rope_type {rope!r} is not run here; supported are {', '.join(family.rope_types)}"
            )
        if config.hidden_act != "silu":
            raise CheckpointError(f"hidden_act {config.hidden_act!r} is not run here, only silu")
        rotary = LlamaRotaryEmbedding(config)  # pyright: ignore[reportArgumentType]
        heads = heads_of(config.to_dict())
        return cls(
            model_type=kind,
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            heads=heads.query,
            kv_heads=heads.kv,
            head_dim=heads.size,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            eps=config.rms_norm_eps,
            windows=_windows(config),
            inverse_frequency=rotary.inv_freq.float(),
            rope_scaling=float(rotary.attention_scaling),
            routing=_routing(family, config),
            tied=config.tie_word_embeddings,
        )


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # Mistral: all or none
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
