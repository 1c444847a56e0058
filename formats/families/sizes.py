"""Sizes that follow from a declaration and a config.json: heads, latents, cache, merged layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from formats.errors import CheckpointError
from formats.families.family import Attention, Family, LatentAttention


@dataclass(frozen=True)
class Heads:
    """Sizes of a model's attention.

    Attributes:
        query: Query heads.
        kv: Heads of K, and of V.
        size: Elements of one head.
    """

    query: int
    kv: int
    size: int


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of a model's latent attention.

    Attributes:
        heads: Query heads.
        rank: Elements R of the latent.
        plain: Channels of a head of q and k that are not rotated.
        rotated: Channels of a head of q and k that are.
        value: Elements of a head of V.
        query_rank: Elements between the two projections of q; None where it is one.
    """

    heads: int
    rank: int
    plain: int
    rotated: int
    value: int
    query_rank: int | None = None


@dataclass(frozen=True)
class Cached:
    """What a block's attention caches of a token.

    Attributes:
        heads: Heads of K, and of V.
        k: Elements of a head of K.
        v: Elements of a head of V.
        latent: Whether it is that of latent attention: "K" is the rotated part of the keys and "V"
            the latent, one of each for all heads.
    """

    heads: int
    k: int
    v: int
    latent: bool = False


def needed(config: Mapping[str, Any], key: str) -> Any:
    """A value of config.json that follows from nothing else.

    Raises:
        CheckpointError: it is not there.
    """
    if config.get(key) is None:
        raise CheckpointError(
            f"config.json: {key} is missing. Add it, or copy config.json of the original model"
        )
    return config[key]


def size_in(config: Mapping[str, Any], key: str) -> int:
    """A size or count of config.json, of whatever family.

    Raises:
        CheckpointError: it is not there, or no positive integer.
    """
    value = needed(config, key)
    if not isinstance(value, int) or not 0 < value < 2**31:
        raise CheckpointError(f"config.json: {key} is {value!r}; needed is a positive integer")
    return value


def heads_of(config: Mapping[str, Any]) -> Heads:
    """The attention's sizes, from config.json: what a config leaves out follows from the rest.

    Raises:
        CheckpointError: a size is none, or it leaves out what nothing can follow from.
    """
    query = size_in(config, "num_attention_heads")
    kv = (
        query
        if config.get("num_key_value_heads") is None
        else size_in(config, "num_key_value_heads")
    )
    if config.get("head_dim") is None:
        return Heads(query, kv, size_in(config, "hidden_size") // query)
    return Heads(query, kv, size_in(config, "head_dim"))


def latent_sizes(config: Mapping[str, Any]) -> LatentSizes:
    """The sizes of latent attention, from config.json.

    Raises:
        CheckpointError: a size is none, or it is not there.
    """
    keys = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    sizes = [size_in(config, key) for key in (*keys, "v_head_dim")]
    lora = config.get("q_lora_rank")
    return LatentSizes(*sizes, query_rank=None if lora is None else size_in(config, "q_lora_rank"))


def cached_of(family: Family | None, config: Mapping[str, Any]) -> Cached:
    """What attention caches of a token, from config.json; None is a family like Llama.

    Raises:
        CheckpointError: a size is none, or it is not there.
    """
    if family is not None and isinstance(family.attention, LatentAttention):
        sizes = latent_sizes(config)
        return Cached(1, sizes.rotated, sizes.rank, latent=True)
    heads = heads_of(config)
    return Cached(heads.kv, heads.size, heads.size)


def may_centre(family: Family, config: Mapping[str, Any]) -> bool:
    """Whether attention stays as it is when one vector is subtracted from all keys of a head.

    The softmax does not see it, unless the logits are bounded or there are sinks. What is cached as
    latents are no keys.
    """
    own = family.attention
    setting = own.softcap_setting
    bounded = setting is not None and config.get(setting) is not None
    return not (isinstance(own, LatentAttention) or own.sinks is not None or bounded)


def rotary_channels(family: Family, config: Mapping[str, Any]) -> int:
    """How many channels of each head turn by rotary embedding: the first ones, an even number."""
    if isinstance(family.attention, LatentAttention):
        return latent_sizes(config).rotated
    size = heads_of(config).size
    if family.partial_rotary is None:
        return size
    key, rope = "partial_rotary_factor", config.get("rope_parameters") or {}
    return int(size * (rope.get(key) or config.get(key) or family.partial_rotary))


def interleaved(family: Family, config: Mapping[str, Any]) -> bool:
    """Whether channels that turn together are stored side by side."""
    own = family.attention
    if isinstance(own, LatentAttention) and own.interleaved_setting is not None:
        return bool(config.get(own.interleaved_setting, True))
    return own.rotary_pairs == "interleaved"


def rotary_order(family: Family, config: Mapping[str, Any]) -> list[int]:
    """A head's channels as runtimes hold those of q and k, by their places as they are stored.

    The channels of turning pair i lie at i and i + D / 2 there, and those that do not turn between.
    """
    size, turning = heads_of(config).size, rotary_channels(family, config)
    turned, passed = list(range(turning)), list(range(turning, size))
    if interleaved(family, config):
        first, second = turned[::2], turned[1::2]
    else:
        first, second = turned[: turning // 2], turned[turning // 2 :]
    half = len(passed) // 2
    return [*first, *passed[:half], *second, *passed[half:]]


def merged_rows(family: Family, config: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Layers that a family's checkpoints hold as one: rows of each part, by the whole's last name.

    Parts are in the order in which they are stored, one below the other.
    """
    merged: dict[str, dict[str, int]] = {}
    if isinstance(family.attention, Attention) and family.attention.stored_merged:
        heads, names = heads_of(config), family.attention
        sizes = (heads.query * heads.size, heads.kv * heads.size, heads.kv * heads.size)
        merged[names.merged] = dict(zip(names.qkv, sizes, strict=True))
    if family.feed_forward.stored_merged:
        names = family.feed_forward
        merged[names.merged] = dict.fromkeys(names.gate_up, size_in(config, "intermediate_size"))
    return merged


def turning_pairs(family: Family, config: Mapping[str, Any], layer: int) -> tuple[int, ...]:
    """A number for each channel of a head, as it is stored; the two that turn together have one.

    A factor for each number commutes with rotary embedding: only the channels of a pair must share
    it. Channels that do not turn, and all of a layer without rotation, are alone.

    Raises:
        CheckpointError: a size is missing in config.json.
    """
    size, turning = heads_of(config).size, rotary_channels(family, config)
    setting = family.attention.unrotated_setting
    rotated = None if setting is None else config.get(setting)
    if rotated is not None and not rotated[layer]:
        turning = 0
    interleaved, half = family.attention.rotary_pairs == "interleaved", turning // 2
    turned = [i // 2 if interleaved else i % half for i in range(turning)]
    return (*turned, *range(half, size - half))
