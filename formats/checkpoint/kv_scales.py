"""The scales of a quantized cache: ours lie beside the served files, others' among them.

    quant/kv_scales.safetensors   A.k_scale and A.v_scale of each attention module A, fp32, where
                                  they are static; A.k_offset [Hkv, D] where keys are centred;
                                  A.q_moments [Hkv, D, D] where they are compensated, second moments
                                  of the queries that read them; and the specification in the file's
                                  metadata: what this project writes
    the served files              the same names, with `kv_cache_scheme` in `quantization_config`:
                                  [1] per tensor, [Hkv, 1, 1] per head (strategy attn_head)

Source of the latter: compressed-tensors 0.17 to 0.20, `initialize_attn_qparams`.

Sink tokens have static scales of their own, and their number in config.json:

    quant/sink_scales.safetensors   X.input_sink_scale [1], fp32, of each linear layer X whose input
                                    has a static scale
    config.json                     `ptq: {sink_tokens: n}`

The first tokens of a sequence can have activations hundreds of times larger than all others, and
keys and values far smaller (Sun et al., "Massive Activations in Large Language Models", arXiv
2402.17762). No scale fits both: rows of the first n positions have one of their own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from formats.cache_scheme import CacheSchemes, KVCacheSpec
from formats.checkpoint.contents import same_names
from formats.documents import Strict
from formats.errors import CheckpointError
from formats.families.registry import predicting_layer
from formats.families.sizes import Cached
from formats.files import find_file
from formats.modeling.layers import attention_names, cached
from formats.stored.folder import KV_SCALES, SINK_SCALES, OwnPart
from formats.stored.safetensors_files import SafetensorsFile, TensorFile, read_tensor
from formats.stored.weights import check_scale

ROLES = ("k_cache", "v_cache")


@dataclass(frozen=True)
class CacheScales:
    """How a cache is quantized, and its static scales.

    Attributes:
        files: Where each tensor is read from, by its name, such as `A.k_scale`.
        by_attention: Static (K, V) scales, fp32 [Hkv] (of K [Hkv, D] where it is scaled by
            channel; of a latent [1, R] likewise), of each attention module by its full name.
        offsets: What is subtracted from K, fp32 [Hkv, D], likewise.
        moments: Second moments of the queries that read K, fp32 [Hkv, D, D], likewise.
    """

    schemes: CacheSchemes = field(default_factory=CacheSchemes)
    files: Mapping[str, TensorFile] = field(default_factory=dict)
    by_attention: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    offsets: Mapping[str, Tensor] = field(default_factory=dict)
    moments: Mapping[str, Tensor] = field(default_factory=dict)


def read_cache(
    path: Path, config: Mapping[str, Any], served: KVCacheSpec | None, files: dict[str, TensorFile]
) -> CacheScales:
    """The scales of a folder's cache.

    Args:
        served: What `kv_cache_scheme` says, or None.
        files: The served tensors; the cache's scales are taken out where `served` says so.

    Raises:
        CheckpointError: some are missing, extra, damaged or of another shape, or there are two
            kinds.
    """
    beside = find_file(path, KV_SCALES)
    if beside is not None and served is not None:
        raise CheckpointError(
            f"{path}: found {KV_SCALES} and a kv_cache_scheme in config.json, which both say how "
            "the cache is quantized. Remove one of them"
        )
    if beside is not None:
        file = SafetensorsFile(beside)
        return _checked(_schemes(file), dict.fromkeys(file.tensors, file), config, f"{KV_SCALES}: ")
    if served is None:
        return CacheScales()
    taken = {f"{a}.{kind}_scale" for a in attention_names(config) for kind in "kv"}
    own = {name: files.pop(name) for name in taken & files.keys()}
    for name in [name for name in files if name.endswith((".k_scale", ".v_scale"))]:
        if predicting_layer(config, name) is not None:  # which drafts with a cache of floats
            del files[name]
    _drop_zero_points(files, config)
    schemes = CacheSchemes(kv_cache=served)
    return _checked(schemes, own, config, "kv_cache_scheme of config.json: ")


def _drop_zero_points(files: dict[str, TensorFile], config: Mapping[str, Any]) -> None:
    """Leave out zero points of a symmetric cache, which some write and which say nothing."""
    names = {f"{a}.{kind}_zero_point" for a in attention_names(config) for kind in "kv"}
    for name in sorted(names & files.keys()):
        if bool(read_tensor(files[name], name).float().any()):
            raise CheckpointError(
                f"{name} is not 0, but the cache is symmetric by kv_cache_scheme of config.json. "
                "Get the checkpoint again"
            )
        del files[name]


def _schemes(file: SafetensorsFile) -> CacheSchemes:
    said = file.metadata.get("kv_cache", "")
    try:
        if '"kv_caches"' in said:
            return CacheSchemes.model_validate_json(said)
        return CacheSchemes(kv_cache=KVCacheSpec.model_validate_json(said))
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise CheckpointError(
            f"{KV_SCALES}: its metadata do not say how the cache is quantized ({reason})"
        ) from error


def cache_metadata(schemes: CacheSchemes) -> dict[str, str]:
    """The metadata of the file of scales, which `_schemes` reads.

    One key: the library writes several in an order that changes from run to run.
    """
    own: Strict | None = schemes.kv_cache
    if schemes.kv_caches:
        own = CacheSchemes(kv_cache=schemes.kv_cache, kv_caches=schemes.kv_caches)
    assert own is not None
    return {"kv_cache": own.model_dump_json()}


def cache_tensors(spec: KVCacheSpec | None) -> tuple[str, ...]:
    """What is stored of an attention module's cache: `k_scale` and the like."""
    if spec is None:
        return ()
    scales = () if spec.dynamic else ("k_scale", "v_scale")
    beside = {"k_offset": spec.center_keys, "q_moments": spec.compensate_keys}
    return (*scales, *(leaf for leaf, own in beside.items() if own))


def _checked(
    schemes: CacheSchemes, files: Mapping[str, TensorFile], config: Mapping[str, Any], where: str
) -> CacheScales:
    attentions = attention_names(config)
    same_names(set(schemes.kv_caches) & set(attentions), set(schemes.kv_caches), where)
    specs = {name: schemes.of(name) for name in attentions}
    wanted = {f"{name}.{leaf}" for name, spec in specs.items() for leaf in cache_tensors(spec)}
    same_names(wanted, set(files), where)
    pairs, offsets, moments = {}, {}, {}
    for name, own in zip(attentions, cached(config), strict=True):
        spec = specs[name]
        if spec is not None and not spec.dynamic:
            k, v = (_scale(spec, f"{name}.{role[0]}_scale", role, files, own) for role in ROLES)
            pairs[name] = (k, v)
        if spec is not None and spec.center_keys:
            offsets[name] = _finite(f"{name}.k_offset", files, (own.heads, own.k))
        if spec is not None and spec.compensate_keys:
            moments[name] = _finite(f"{name}.q_moments", files, (own.heads, own.k, own.k))
    return CacheScales(schemes, files, pairs, offsets, moments)


def _finite(name: str, files: Mapping[str, TensorFile], wanted: tuple[int, ...]) -> Tensor:
    """A tensor of finite numbers, in fp32."""
    shape, found = files[name].tensors[name][1], read_tensor(files[name], name).float()
    if shape != wanted or not bool(torch.isfinite(found).all()):
        raise CheckpointError(
            f"{name} has the shape {shape} or holds NaN or infinity; needed are finite numbers "
            f"{wanted}. Copy the checkpoint again or write it again"
        )
    return found


def _scale(
    spec: KVCacheSpec, name: str, role: Any, files: Mapping[str, TensorFile], own: Cached
) -> Tensor:
    """One scale in fp32, by head."""
    shape = files[name].tensors[name][1]
    size = own.k if role == "k_cache" else own.v
    wanted = spec.scale_shape(role, own.heads, size, latent=own.latent)
    scale = read_tensor(files[name], name)
    if shape in ((*wanted, 1, 1), ()) and scale.numel() == math.prod(wanted):  # served so
        scale = scale.reshape(wanted)
    check_scale(name, scale, (wanted,))
    scale = scale.float()
    return scale.expand(own.heads) if scale.numel() == 1 else scale


LEAF = "input_sink_scale"


@dataclass(frozen=True)
class Sinks:
    """Sink tokens of a checkpoint.

    Attributes:
        tokens: How many there are at the beginning of every sequence.
        files: Where each tensor is read from, by `X.input_sink_scale`.
        scales: Of the rows of sink tokens, fp32 [1], by the layer's full name.
    """

    tokens: int = 0
    files: Mapping[str, TensorFile] = field(default_factory=dict)
    scales: Mapping[str, Tensor] = field(default_factory=dict)


def read_sinks(path: Path, own: OwnPart | None, static: Collection[str]) -> Sinks:
    """The sink tokens of a folder.

    Args:
        own: What config.json says of `quant/`; None where it says nothing.
        static: Full names of the linear layers whose input has a static scale.

    Raises:
        CheckpointError: scales are missing, extra, damaged or of another shape.
    """
    tokens, beside = 0 if own is None else own.sink_tokens, find_file(path, SINK_SCALES)
    if not tokens:
        if beside is not None:
            raise CheckpointError(
                f"{path}: found {SINK_SCALES}, but config.json says of no sink tokens. Copy the "
                "checkpoint again as a whole"
            )
        return Sinks()
    if beside is None:
        raise CheckpointError(
            f"{path}: config.json says that {tokens} sink tokens have scales of their own, but "
            f"{SINK_SCALES} is missing. Copy the checkpoint again with its folder quant/"
        )
    file = SafetensorsFile(beside)
    files = dict.fromkeys(file.tensors, file)
    same_names({f"{name}.{LEAF}" for name in static}, set(files), f"{SINK_SCALES}: ")
    scales = {}
    for name in static:
        tensor = f"{name}.{LEAF}"
        scale = read_tensor(file, tensor)
        check_scale(tensor, scale, ((1,),))
        scales[name] = scale.float()
    return Sinks(tokens, files, scales)
