"""PaddleNLP's three tables of scales, as JSON: activations, weights and cache KV.

    act_scales.json       F.layers.I.self_attn.q_proj.activation_quanter     number
    weight_scales.json    F.layers.I.self_attn.q_proj.weight_quanter         [outputs], fp8: number
    cachekv_scales.json   F.layers.I.self_attn.cachek_matmul.activation_quanter, cachev_matmul...
                                                                             [query heads]

F is the family, such as `llama`. Values are the largest magnitude that is rendered, not the step:
scale * 127, for fp8 scale * 448. They are written in fp64, where this product is exact, so that
dividing gives the same fp32 scale back; Paddle rounds them to fp32. Cache tables have an entry for
each query head, of which readers take every (query heads / KV heads)-th. All three files are
written, empty where nothing is there; int8 tables are read.

Source: PaddleNLP `paddlenlp/experimental/model_utils.py` (ActScalesLoader, WeightScalesLoader,
CacheScaleLoader) and the scale maps of `experimental/transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from formats.errors import CheckpointError
from formats.families.names import MERGED
from formats.families.registry import FAMILIES, find_family
from formats.families.sizes import heads_of
from formats.scheme import Scheme

if TYPE_CHECKING:
    from formats.checkpoint.read import Checkpoint

Table = dict[str, float | list[float]]
FILES = ("act_scales.json", "weight_scales.json", "cachekv_scales.json")
LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0}


def paddle_tables(checkpoint: Checkpoint) -> dict[str, Table]:
    """The tables of a checkpoint by their file's name.

    Raises:
        CheckpointError: another model family, a scheme that the tables do not express, or input
            scales that differ within a merged product.
    """
    refuse_paddle(checkpoint.scheme)
    checkpoint.require_one_scheme("a set of Paddle's tables")
    require_family(checkpoint.config)
    return dict(
        zip(FILES, (_inputs(checkpoint), _weights(checkpoint), _cache(checkpoint)), strict=True)
    )


def require_family(config: Mapping[str, Any]) -> str:
    """The family of a model, as Paddle's tables name it.

    Raises:
        CheckpointError: names in the tables are not known of it.
    """
    family = find_family(config)
    if family is None or family.paddle is None:
        known = ", ".join(family.paddle for family in FAMILIES if family.paddle)
        raise CheckpointError(
            f"config.json: found model_type {config.get('model_type')!r}; names in Paddle's tables "
            f"are known of {known} only"
        )
    return family.paddle


def refuse_paddle(scheme: Scheme) -> None:
    """Refuse a scheme that the tables do not express.

    Raises:
        CheckpointError: see the message.
    """
    weights, inputs, cache = scheme.weights, scheme.activations, scheme.kv_cache
    kinds = {("int8", "per_channel"), ("fp8_e4m3", "per_tensor")}
    found = None
    if not scheme.quantizes_anything:
        found = "a float checkpoint"
    elif weights and (not weights.symmetric or (weights.dtype, weights.granularity) not in kinds):
        found = weights.text
    elif inputs and inputs.dynamic:
        found = inputs.text
    elif cache and (cache.dtype != "int8" or cache.granularity not in ("per_head", "per_tensor")):
        found = f"cache {cache.dtype} {cache.granularity}"
    if found:
        raise CheckpointError(
            f"found {found}; Paddle's tables hold int8 weights per channel or fp8 weights per "
            "tensor, static inputs per tensor, and a static int8 cache per head or per tensor. "
            "Quantize with a recipe such as a8w8c8"
        )


def _inputs(checkpoint: Checkpoint) -> Table:
    spec = checkpoint.scheme.activations
    if spec is None:
        return {}
    modules = checkpoint.quantized_modules
    scales = {module: checkpoint.scale(f"{module}.input_scale") for module in modules}
    check_merged({module: scale.item() for module, scale in scales.items()})
    return {
        f"{_name(checkpoint, module)}.activation_quanter": _numbers(scale, LARGEST[spec.dtype])[0]
        for module, scale in scales.items()
    }


def check_merged(scales: Mapping[str, float]) -> None:
    """Refuse input scales by layer that differ within a product that Paddle merges.

    Raises:
        CheckpointError: they do.
    """
    for first, scale in scales.items():
        module, _, leaf = first.rpartition(".")
        for parts in MERGED.values():  # Paddle takes the input scale of the first for all
            for other in (f"{module}.{name}" for name in parts[1:] if leaf == parts[0]):
                if scales.get(other, scale) != scale:
                    raise CheckpointError(
                        f"input scales of {first} and {other} differ ({scale:.6g} and "
                        f"{scales[other]:.6g}); Paddle would use the first for both. Write the "
                        "checkpoint again with one scale"
                    )


def _weights(checkpoint: Checkpoint) -> Table:
    spec, table = checkpoint.scheme.weights, Table()
    if spec is None:
        return table
    for module in checkpoint.quantized_modules:
        numbers = _numbers(checkpoint.scale(f"{module}.weight_scale"), LARGEST[spec.dtype])
        one = spec.granularity == "per_tensor"
        table[f"{_name(checkpoint, module)}.weight_quanter"] = numbers[0] if one else numbers
    return table


def _cache(checkpoint: Checkpoint) -> Table:
    table, queries = Table(), heads_of(checkpoint.config).query
    for attention, pair in checkpoint.kv_scales.items():
        for letter, scale in zip("kv", pair, strict=True):
            of_queries = scale.repeat_interleave(queries // len(scale))
            name = f"{_name(checkpoint, attention)}.cache{letter}_matmul.activation_quanter"
            table[name] = _numbers(of_queries, LARGEST["int8"])
    return table


def _numbers(scale: Tensor, largest: float) -> list[float]:
    """Largest magnitudes of fp32 scales, exact in fp64: 24 + 9 bits."""
    return (scale.flatten().double() * largest).tolist()


def _name(checkpoint: Checkpoint, module: str) -> str:
    return table_name(require_family(checkpoint.config), module)


def table_name(family: str, module: str) -> str:
    """A module's name in the tables, without `_quanter`."""
    return f"{family}.{module.removeprefix('model.')}"
