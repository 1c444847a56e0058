"""The values of config.json that are read, with their types and ranges.

Only families that are declared here are checked: others may mean something else by a key. What is
absent follows from the rest or from transformers' defaults; what nothing can follow from is asked
for where it is needed (`formats.families.sizes.needed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from formats.documents import Values, check_values
from formats.families.registry import MOST_LAYERS, find_family

Size = Annotated[int, Field(gt=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Token = Annotated[int, Field(gt=-(2**31), lt=2**31)]
EndTokens = Token | list[Token] | None


def named_dtype(config: Mapping[str, Any]) -> str | None:
    """The type of weights that a config names, such as `bfloat16`: as transformers 5 or 4 does."""
    return config.get("dtype") or config.get("torch_dtype")


class RotationValues(Values):
    """The rotation of one kind of layers."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    attention_factor: Positive | None = None
    partial_rotary_factor: Share | None = None
    original_max_position_embeddings: Size | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Finite | None = None
    mscale_all_dim: Finite | None = None
    truncate: bool | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None
    llama_4_scaling_beta: Annotated[Finite, Field(ge=0)] | None = None


class RopeValues(RotationValues):
    """`rope_parameters`, or `rope_scaling` as older files name it; maybe by kind of layers."""

    full_attention: RotationValues | None = None
    sliding_attention: RotationValues | None = None


class ModelValues(Values):
    """A decoder's shape and what its layers compute."""

    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Annotated[Size, Field(le=MOST_LAYERS)] | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    qk_rope_head_dim: Size | None = None
    vocab_size: Size | None = None
    max_position_embeddings: Size | None = None
    rms_norm_eps: Annotated[Positive, Field(lt=1)] | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    use_bidirectional_attention: bool | None = None
    embedding_multiplier: Positive | None = None
    attention_multiplier: Positive | None = None
    residual_multiplier: Positive | None = None
    logits_scaling: Positive | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Size | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    sliding_window: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    rope_theta: Positive | None = None
    rope_local_base_freq: Positive | None = None
    rope_parameters: RopeValues | None = None
    rope_scaling: RopeValues | None = None
    partial_rotary_factor: Share | None = None
    num_experts: Size | None = None
    num_local_experts: Size | None = None
    n_routed_experts: Size | None = None
    n_group: Size | None = None
    topk_group: Size | None = None
    routed_scaling_factor: Positive | None = None
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Size | None = None
    norm_topk_prob: bool | None = None
    swiglu_alpha: Positive | None = None
    swiglu_limit: Positive | None = None
    use_qk_norm: bool | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: EndTokens = None

    @model_validator(mode="after")
    def _heads_share_evenly(self) -> Self:
        heads, kv_heads, hidden = (
            self.num_attention_heads,
            self.num_key_value_heads,
            self.hidden_size,
        )
        if heads and kv_heads and heads % kv_heads:
            raise ValueError(f"{heads} num_attention_heads do not share {kv_heads} KV heads evenly")
        if heads and hidden and not self.head_dim and hidden % heads:
            raise ValueError(f"hidden_size {hidden} does not divide into {heads} heads")
        if (self.head_dim or 0) % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}; rotary embedding turns pairs of channels"
            )
        experts = self.num_experts or self.num_local_experts or self.n_routed_experts
        if experts and (self.num_experts_per_tok or 0) > experts:
            raise ValueError(f"{self.num_experts_per_tok} num_experts_per_tok of {experts} experts")
        return self

    @model_validator(mode="after")
    def _one_size_is_rotated(self) -> Self:
        rotated = self.qk_rope_head_dim
        if rotated and self.head_dim not in (None, rotated):
            raise ValueError(
                f"head_dim is {self.head_dim} and qk_rope_head_dim is {rotated}; latent attention "
                "rotates qk_rope_head_dim channels of a head, and transformers makes the rotary "
                f"embedding for head_dim: leave head_dim out, or make it {rotated}"
            )
        return self


class GenerationValues(Values):
    """generation_config.json, of which only the tokens that end a text are read."""

    eos_token_id: EndTokens = None


def check_model_values(config: Mapping[str, Any], origin: str, remedy: str) -> None:
    """Check what config.json says of a model whose family is declared.

    Raises:
        CheckpointError: a value has another type or is out of its range; it is named.
    """
    if find_family(config) is not None:
        check_values(config, ModelValues, origin, remedy)
