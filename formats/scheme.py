"""Scheme: what is quantized and how, for weights, activations and cache KV ("WAC").

The vocabulary that every room shares. A scheme is frozen data: it is written in the recipe,
resolved by the plan, stored in the checkpoint and dispatched on by the runtime. Names follow the
field: a scale is a multiplier, ``w = q * scale``; `per_channel` means one scale for each output
channel of a weight `[out, in]`; `per_token` one for each row of an activation `[tokens, in]`;
`per_head` one for each key/value head.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    """Frozen configuration that rejects unknown keys and does not coerce types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class WeightSpec(Strict):
    """How a linear layer's weight `[out, in]` is stored.

    YAML: ``weights: {dtype: int8, granularity: per_channel}``
    """

    dtype: Literal["int8"] = "int8"
    granularity: Literal["per_channel"] = "per_channel"

    @property
    def bits(self) -> int:
        """Bits of one stored weight."""
        return 8


class ActivationSpec(Strict):
    """How a linear layer's input `[tokens, in]` is quantized.

    `per_tensor` is static: one calibrated scale. `per_token` is dynamic: each row is scaled by its
    own absmax when it arrives.

    YAML: ``activations: {dtype: int8, granularity: per_tensor}``
    """

    dtype: Literal["int8"] = "int8"
    granularity: Literal["per_tensor", "per_token"] = "per_tensor"

    @property
    def dynamic(self) -> bool:
        """Whether the scale is computed at run time."""
        return self.granularity == "per_token"

    @property
    def bits(self) -> int:
        """Bits of one quantized activation."""
        return 8


class KVCacheSpec(Strict):
    """How K (after RoPE) and V are stored in the cache, with calibrated static scales.

    YAML: ``kv_cache: {dtype: int8, granularity: per_head}``
    """

    dtype: Literal["int8"] = "int8"
    granularity: Literal["per_head", "per_tensor"] = "per_head"

    @property
    def bits(self) -> int:
        """Bits of one cached element."""
        return 8


class Scheme(Strict):
    """Weights, activations and cache KV of one checkpoint; None leaves a part unquantized.

    Raises:
        ValueError: activations are quantized but weights are not: no integer kernel runs that.
    """

    weights: WeightSpec | None = None
    activations: ActivationSpec | None = None
    kv_cache: KVCacheSpec | None = None

    @model_validator(mode="after")
    def _activations_need_weights(self) -> Scheme:
        if self.activations is not None and self.weights is None:
            raise ValueError(
                "activations are quantized but weights are not; no kernel multiplies integer "
                "activations with floating-point weights. Add weights or drop activations"
            )
        if self.weights is not None and self.activations is None:
            raise ValueError(
                "int8 weights without quantized activations are not supported; add activations "
                "(per_tensor or per_token) or drop weights"
            )
        return self

    @property
    def wac(self) -> str:
        """Short name in the field's notation, such as `a8w8c8`, `a8w8`, `c8`; `float` for none."""
        parts = (("a", self.activations), ("w", self.weights), ("c", self.kv_cache))
        return "".join(f"{letter}{spec.bits}" for letter, spec in parts if spec) or "float"

    @property
    def quantizes_anything(self) -> bool:
        """Whether any part of the model is quantized."""
        return self.weights is not None or self.kv_cache is not None


PRESETS: dict[str, Scheme] = {
    "a8w8c8": Scheme(weights=WeightSpec(), activations=ActivationSpec(), kv_cache=KVCacheSpec()),
    "a8w8": Scheme(weights=WeightSpec(), activations=ActivationSpec()),
    "a8w8_dynamic": Scheme(
        weights=WeightSpec(), activations=ActivationSpec(granularity="per_token")
    ),
    "a8w8c8_dynamic": Scheme(
        weights=WeightSpec(),
        activations=ActivationSpec(granularity="per_token"),
        kv_cache=KVCacheSpec(),
    ),
    "c8": Scheme(kv_cache=KVCacheSpec()),
}
