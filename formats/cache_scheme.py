"""How keys and values are stored in the cache, and recurrent states that it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from formats.documents import Strict

CacheType = Literal["int8", "fp8_e4m3", "int4"]
CacheRole = Literal["k_cache", "v_cache"]
CACHE_BITS = {"int8": 8, "fp8_e4m3": 8, "int4": 4}
KEYS_MOVED = ("rotate_keys", "center_keys", "compensate_keys")  # fields: keys not rounded as given


class KVCacheSpec(Strict):
    """How K (after RoPE) and V are stored in the cache.

    YAML: ``kv_cache: {dtype: int4, granularity: per_token_head, rotate_keys: true}``
    """

    dtype: CacheType = "int8"
    """Type of cached keys and values: `int8` and `fp8_e4m3` take half the memory of 16 bits, `int4`
    a quarter; two numbers share a byte, so that heads have an even size.
    """
    granularity: Literal["per_head", "per_tensor", "per_channel", "per_token_head"] = "per_head"
    """`per_head` and `per_tensor` have scales fixed at calibration. `per_channel` has
    one, fixed too, for each channel of K, for keys with outlying channels, and one for each head of
    V. `per_token_head` scales each head of each token when it is written, and needs no data.

    Latent attention (DeepSeek) caches one rotated key part and one latent for all heads, which
    stand here for K and V: scales of the key part are as above. The latent has a scale for each of
    its channels (but one with `per_tensor`), which differ widely and cost nothing: its scales are
    multiplied with queries and results. They are fixed at calibration; `per_token_head` is refused,
    and so is int4.
    """
    value_dtype: Literal["int4"] | None = None
    """Type of cached values if it differs from that of keys: `int4` with int8 keys, which are the
    first to lose accuracy. Null: the same type.
    """
    rotate_keys: bool = False
    """Whether queries and keys are turned by a Hadamard matrix, head by head, after RoPE: their
    products stay, and what was large in one channel is spread over all (Ashkboos et al., "QuaRot",
    arXiv 2404.00456, section 4). int4 keys need it; scales are `per_token_head` then. For values,
    add the method rotation with `residual: false`, `values: true`: it is folded into weights and
    costs nothing.
    """
    center_keys: bool = False
    """Whether the mean of each channel of K is subtracted before K is quantized: over the
    calibration data, at all positions of a context (of a model that no family declares, at those of
    the data). All products of a query with the keys of its head then decrease by one number, which
    the softmax cancels: it costs nothing (Zhang et al., "SageAttention", arXiv 2410.02367, section
    4.2). fp8 keys, whose error goes with their magnitude, lose less so after a few hundred tokens;
    int8 and int4 keys have scales `per_token_head` then. Where attention bounds its logits, has
    sinks or caches latents, a scheme named as a whole leaves keys as they are, and `true` is
    refused.
    """

    compensate_keys: bool = False
    """Whether later channels of an int4 key compensate the rounding error of each channel, weighted
    by the calibration data's queries: GPTQ's rule (Frantar et al., arXiv 2210.17323) for a row that
    is rounded when it is written. It takes half of the keys' loss away; what is stored, and how it
    is read, stays as it is. Scales are `per_token_head` then.
    """

    @model_validator(mode="after")
    def _types_go_together(self) -> KVCacheSpec:
        if self.value_dtype is not None and self.dtype != "int8":
            raise ValueError(
                f"found value_dtype {self.value_dtype} with dtype {self.dtype}; values of a type "
                "of their own stand beside int8 keys. Set dtype: int8, or leave value_dtype out"
            )
        static = {"center_keys"} if self.dtype == "fp8_e4m3" else set()
        moved = next((n for n in KEYS_MOVED if getattr(self, n) and n not in static), None)
        if moved is not None and not self.dynamic:
            raise ValueError(
                f"found {moved} with {self.dtype} and {self.granularity} scales; keys that are "
                "turned, compensated, or centred in integers are scaled as they come. Set "
                f"granularity: per_token_head, or {moved}: false"
            )
        if self.compensate_keys and self.dtype != "int4":
            raise ValueError(
                f"found compensate_keys with dtype {self.dtype}; int4 keys alone are rounded so. "
                "Set dtype: int4, or compensate_keys: false"
            )
        return self

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is as it always was is not said: files of 8-bit caches stay as they were."""
        unsaid = {"value_dtype": None, "rotate_keys": False, "center_keys": False}
        unsaid["compensate_keys"] = False
        return {
            key: value
            for key, value in handler(self).items()
            if key not in unsaid or value != unsaid[key]
        }

    @property
    def dynamic(self) -> bool:
        """Whether scales are computed at run time."""
        return self.granularity == "per_token_head"

    def dtype_of(self, role: CacheRole) -> CacheType:
        """Type of cached keys or values."""
        return self.value_dtype or self.dtype if role == "v_cache" else self.dtype

    def bits_of(self, role: CacheRole) -> int:
        """Bits of one cached element of K or V."""
        return CACHE_BITS[self.dtype_of(role)]

    @property
    def uncentred(self) -> KVCacheSpec:
        """As it is, with keys that nothing is subtracted from."""
        return self.model_copy(update={"center_keys": False})

    @property
    def packed(self) -> bool:
        """Whether keys or values lie two in a byte."""
        return "int4" in (self.dtype, self.value_dtype)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a dynamic scale, as the checkpoint's size and capacity count it."""
        return 2 if self.packed else 4

    @property
    def name(self) -> str:
        """The field's notation: `c8`, `cf8`, `c4`, `k8v4`."""
        if self.value_dtype is not None:
            return f"k{CACHE_BITS[self.dtype]}v{CACHE_BITS[self.value_dtype]}"
        return f"c{'f' if self.dtype.startswith('fp') else ''}{CACHE_BITS[self.dtype]}"

    @property
    def marks(self) -> Iterator[str]:
        """What the name leaves open.

        Unsaid go scales per head, and where values are int4 scales of each token; that int4 keys
        are turned, centred and compensated, static fp8 keys centred, and others are not.
        """
        if self.granularity != ("per_token_head" if self.packed else "per_head"):
            yield f"cache_{self.granularity}"
        packed = self.dtype == "int4"
        if self.rotate_keys != packed:
            yield "cache_rotated" if self.rotate_keys else "cache_unrotated"
        if self.center_keys != (packed or (self.dtype == "fp8_e4m3" and not self.dynamic)):
            yield "cache_centred" if self.center_keys else "cache_uncentred"
        if self.compensate_keys != packed:
            yield "cache_uncompensated"

    @property
    def text(self) -> str:
        """A few words for a person."""
        values = f" keys, {self.value_dtype} values" if self.value_dtype else ""
        turned = ", keys turned" if self.rotate_keys else ""
        centred = ", keys centred" if self.center_keys else ""
        fed = ", keys compensated" if self.compensate_keys else ""
        return f"{self.dtype}{values} {self.granularity}{turned}{centred}{fed}"

    def by_channel(self, role: CacheRole, *, latent: bool = False) -> bool:
        """Whether each channel of K or V has a static scale; `latent` for latent attention."""
        if role == "v_cache":
            return latent and self.granularity != "per_tensor"
        return self.granularity == "per_channel"

    def scale_shape(self, role: CacheRole, heads: int, dim: int, *, latent: bool = False) -> tuple:
        """Shape of the static scales of K or V, for KV heads of `dim` elements."""
        if self.granularity == "per_tensor":
            return (1,)
        return (heads, dim) if self.by_channel(role, latent=latent) else (heads,)


class StateSpec(Strict):
    """How the prefix cache keeps the states of recurrent models (Gated DeltaNet, Mamba).

    A prefix is found at the borders of blocks of 64 tokens whose states were kept. In int8 they
    take a quarter of fp32's memory and half of bf16's, so that more prefixes fit. The running state
    stays in float: rounded at every step, it would add up the loss of all steps. Each matrix of a
    state has a scale for each row and each column, and an element is scaled by their product. The
    scales are chosen when the state is kept, without data. States of convolutions are small and
    stay unchanged. A found prefix then no longer has the bits of a computed one; without this it
    does. Other runtimes ignore it.

    YAML: ``states: {dtype: int8}``
    """

    dtype: Literal["int8"] = "int8"
    """Type of kept states."""

    @property
    def name(self) -> str:
        """Its part of a scheme's short name: `s8`."""
        return "s8"

    @property
    def text(self) -> str:
        """A few words for a person."""
        return f"{self.dtype} by row and column, dynamic, where the prefix cache keeps them"


class CacheSchemes(Strict):
    """How the caches of a model's attention modules are quantized.

    Attributes:
        kv_cache: Of all that `kv_caches` does not name; None where K and V are not quantized.
        kv_caches: Of modules with a cache of their own, by full name.
    """

    kv_cache: KVCacheSpec | None = None
    kv_caches: Mapping[str, KVCacheSpec | None] = {}

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key == "kv_cache" or value}

    def of(self, attention: str) -> KVCacheSpec | None:
        """How the cache of an attention module, by its full name, is quantized."""
        return self.kv_caches.get(attention, self.kv_cache)

    @property
    def any(self) -> bool:
        """Whether any cache is quantized."""
        return self.kv_cache is not None or any(self.kv_caches.values())
