"""Random weights of a shape and a scheme: the speed of a model without the model.

Weights are Gaussian and seeded, norms are ones, biases zeros; quantized layers are rounded to
nearest. Static scales of inputs and of the cache are one constant. The tokens of such a model mean
nothing, its times are those of a real one. A `RandomCheckpoint` is stored nowhere: its tensors are
made on the device where they are read. `random_checkpoint` writes one to a disk, tensor by tensor.
"""

from __future__ import annotations

import copy
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import kernels.numerics as numerics
from formats.cache_scheme import CacheSchemes
from formats.checkpoint.kv_scales import CacheScales, Sinks
from formats.checkpoint.part import Cut, Span, cut_shape
from formats.checkpoint.read import Checkpoint
from formats.checkpoint.split import split_shapes
from formats.checkpoint.write import CheckpointWriter
from formats.errors import RequestError
from formats.families.block_layers import EMBEDDING, HEAD, expert_of, is_projection, is_weight_only
from formats.families.registry import attention_names, find_family
from formats.families.sizes import cached_of, may_centre
from formats.scale_table import Role, ScaleEntry, ScaleTable, unmeasured_entry
from formats.scheme import LayerScheme, Scheme
from formats.stored.weights import StoredWeight, join_weights, scale_in_table, storage_format
from inference.backend import choose_backend
from inference.bench.shapes import PUBLISHED, read_scheme, read_shape
from inference.config import EngineConfig
from inference.engine import Engine
from inference.parallel.backend import choose_ranks
from kernels.two_level import choose_unit, nearest_multiples

DEVIATION = 0.02
ABSMAX = 4.0  # of inputs and of cached K and V, where their scale is static
ROLES: tuple[Literal["k_cache"], Literal["v_cache"]] = ("k_cache", "v_cache")
HEAD_PRESET = "a8w8_dynamic"
VERSION = 1  # of the numbers; raise it when they change, as a folder that is there is taken
SHARD_BYTES = 256 << 20


class RandomCheckpoint(Checkpoint):
    """A checkpoint of random weights in no file: its tensors are made when they are read.

    Args:
        shape: As in `read_shape`.
        scheme: As in `read_scheme`.
        quantize_head: Quantize the head too, which is the embedding of a tied shape.
        head: How: a preset; default int8, its input per token.

    Attributes:
        layers: Schemes of the linear layers that are quantized.
    """

    def __init__(
        self,
        shape: str,
        scheme: str,
        device: torch.device | str,
        *,
        quantize_head: bool = False,
        head: str = HEAD_PRESET,
    ) -> None:
        name, config = read_shape(shape)
        self.path, self.scheme = Path(f"{name}-{scheme}"), read_scheme(scheme)
        self.config, self.sinks = config | {"torch_dtype": "bfloat16"}, Sinks()
        self._files, self._foreign = {}, {}  # nothing is on a disk
        self._device, self._shapes = device, tensor_shapes(config)
        self.shares_head = quantize_head and f"{HEAD}.weight" not in self._shapes
        if self.shares_head:
            self._shapes[f"{HEAD}.weight"] = self._shapes.pop(f"{EMBEDDING}.weight")
        self.scheme = with_keys_that_fit(self.scheme, config)
        layers = quantized_layers(self._shapes, self.scheme, PUBLISHED.get(shape))
        if layers and self.scheme.of_layers not in layers.values():  # only experts, or no 128 fits
            first = next(iter(layers.values()))
            self.scheme = self.scheme.model_copy(update={"weights": first.weights})
        rest = {HEAD: read_scheme(head).of_layers} if quantize_head else {}
        self.layers = self._schemes = layers | rest
        self.quantized_modules, self.scale_table = tuple(sorted(self.layers)), None
        self._cache = constant_cache(config, self.scheme)
        self.caches = self._cache.schemes
        self.kv_scales, self.kv_offsets = self._cache.by_attention, self._cache.offsets
        self.query_moments = self._cache.moments

    def __contains__(self, name: str) -> bool:
        module, _, leaf = name.rpartition(".")
        if module in self.layers and leaf == "input_scale":
            return self.layers[module].static_input
        return name in self._shapes and (leaf != "weight" or module not in self.layers)

    def names(self) -> tuple[str, ...]:
        """All tensors of the model, as they are before layers are quantized."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        """A random tensor: the same each time."""
        return self._random(name, self._shapes[name])

    def tensors(self, names: Sequence[str]) -> Tensor:
        """Weights that are not quantized, or scales of static inputs, as one."""
        if names[0].endswith(".input_scale"):
            return self.scale(names[0]).repeat(len(names))
        parts = [drawn.flatten(0, 1) for drawn in self._drawn(names)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def weights(self, modules: Sequence[str], device: torch.device | str = "cpu") -> StoredWeight:
        """Random quantized weights as one; they are where tensors are made."""
        drawn = self._drawn([f"{module}.weight" for module in modules])
        made = [round_to_nearest(values.float(), self.layers[modules[0]]) for values in drawn]
        return join_weights([_as_one(weights) for weights in made])

    def scale(self, name: str) -> Tensor:
        """The scale of a static input, fp32 [1]."""
        inputs = self.layers[name.rpartition(".")[0]].activations
        assert inputs is not None
        return numerics.choose_scale(torch.tensor([ABSMAX]), numerics.TYPES[inputs.dtype])

    def part(self, cuts: Mapping[str, Cut], vectors: Mapping[str, Span]) -> RandomCheckpoint:
        """Random weights of the shapes of some outputs and inputs of its layers."""
        own, shapes = copy.copy(self), dict(self._shapes)
        for name, shape in shapes.items():
            module, _, leaf = name.rpartition(".")
            if name in vectors:
                shapes[name] = (vectors[name].count,)
            elif module in cuts and leaf == "weight":
                shapes[name] = cut_shape(shape, cuts[module])
            elif module in cuts and cuts[module].rows is not None:  # a bias
                shapes[name] = cut_shape((*shape, 1), cuts[module])[:1]
        own._shapes = shapes
        return own

    def _drawn(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Random weights, of neighbours of one shape together: [how many, N, K]."""
        for shape, run in groupby(names, self._shapes.__getitem__):
            alike = list(run)
            yield self._random(alike[0], (len(alike), *shape))

    def _random(self, name: str, size: tuple[int, ...]) -> Tensor:
        """A tensor, bf16, seeded by its name: Gaussian; norms are ones, biases zeros."""
        if len(size) == 1:
            value = float(name.endswith(".weight"))
            return torch.full(size, value, dtype=torch.bfloat16, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(size, generator=generator, device=self._device)
        return values.mul_(DEVIATION).bfloat16()


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors, as transformers has them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return split_shapes(shapes, config)


def quantized_layers(
    shapes: Mapping[str, tuple[int, ...]], scheme: Scheme, experts: LayerScheme | None
) -> dict[str, LayerScheme]:
    """Schemes of the blocks' quantized layers, in the largest groups that fit them.

    `experts` have one of their own, or None.
    """
    modules = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
    own, layers = scheme.of_layers, dict[str, LayerScheme]()
    for module in modules:
        if experts is not None and expert_of(module) is not None:
            layers[module] = experts
        elif own.weights and is_projection(module):
            fitting = (own.weights_alone if is_weight_only(module) else own).opened
            layers[module] = fitting.fitted(shapes[f"{module}.weight"][-1])
    return layers


def round_to_nearest(weight: Tensor, scheme: LayerScheme) -> StoredWeight:
    """Round [N, K], or several [n, N, K], to nearest.

    Scales of packed weights are bf16's, as they are stored in it.
    """
    spec = scheme.weights
    assert spec is not None
    kind, zero_point, unit = numerics.TYPES[spec.dtype], None, None
    block = (1,) * (weight.dim() - 2) + spec.block
    if spec.scale_type == "e8m0":
        scale = numerics.choose_power(numerics.block_absmax(weight, block), kind)
    elif spec.symmetric:
        scale = numerics.choose_scale(numerics.block_absmax(weight, block), kind)
    else:
        blocks = numerics.block_view(numerics.pad_to_blocks(weight, block), block)
        inner = tuple(range(1, blocks.dim(), 2))
        scale, zero_point = numerics.choose_affine(blocks.amin(inner), blocks.amax(inner), kind)
        zero_point = zero_point.float() if spec.float_zeros else zero_point
    if storage_format(scheme) == "pack-quantized":
        scale = scale.bfloat16().float()
    if spec.scale_type == "e4m3":
        unit = numerics.e4m3_unit(scale.max()).expand(*scale.shape[:-1], 1)
        scale = numerics.e4m3_multiples(scale, unit)
    if spec.two_level and spec.symmetric:
        level = choose_unit(scale)
        scale = nearest_multiples(scale, level) * level
    q = numerics.quantize(weight, scale, kind, zero_point, block)
    return StoredWeight(q, scale, zero_point, unit=unit)


def with_keys_that_fit(scheme: Scheme, config: dict[str, Any]) -> Scheme:
    """A named scheme for a model: where its keys cannot be centred, they are not."""
    family, cache = find_family(config), scheme.kv_cache
    if cache is None or family is None or may_centre(family, config):
        return scheme
    return scheme.model_copy(update={"kv_cache": cache.uncentred})


def constant_cache(config: dict[str, Any], scheme: Scheme) -> CacheScales:
    """A cache whose static scales are one constant; what centred keys lack is 0."""
    spec, names = scheme.kv_cache, attention_names(config)
    if spec is None:
        return CacheScales()
    own = cached_of(find_family(config), config)

    def scale(role: Literal["k_cache", "v_cache"], size: int) -> Tensor:
        shape = spec.scale_shape(role, own.heads, size, latent=own.latent)
        return numerics.choose_scale(torch.full(shape, ABSMAX), numerics.TYPES[spec.dtype_of(role)])

    static = () if spec.dynamic else names
    scales = {name: (scale("k_cache", own.k), scale("v_cache", own.v)) for name in static}
    centred = names if spec.center_keys else ()
    offsets = {name: torch.zeros(own.heads, own.k) for name in centred}
    seen = names if spec.compensate_keys else ()
    moments = {name: torch.eye(own.k).repeat(own.heads, 1, 1) for name in seen}
    return CacheScales(CacheSchemes(kv_cache=spec), {}, scales, offsets, moments)


def _as_one(weights: StoredWeight) -> StoredWeight:
    """Weights [how many, N, K] as rows below each other."""
    rest = (weights.zero_point, weights.unit)
    zeros, unit = (None if own is None else own.flatten(0, 1) for own in rest)
    return StoredWeight(weights.q.flatten(0, 1), weights.scale.flatten(0, 1), zeros, unit=unit)


def words_of(vocabulary: int) -> Tokenizer:
    """A tokenizer that has a word for every token, such as `t17`: what it decodes, it encodes."""
    words = {f"t{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def random_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of a random model."""
    return PreTrainedTokenizerFast(tokenizer_object=words_of(vocabulary), unk_token="t0")


def random_engine(
    make: Callable[[], Checkpoint], config: EngineConfig, device: str, quantized_kv: bool = True
) -> Engine:
    """An engine of random weights; `make` makes the checkpoint, for each rank anew."""
    checkpoint = make()
    tokenizer = random_tokenizer(int(checkpoint.config["vocab_size"]))
    backend = choose_ranks(choose_backend(device, checkpoint), make, config)
    return Engine(checkpoint, tokenizer, config, backend, quantized_kv=quantized_kv)


def random_checkpoint(work: Path, shape: str, scheme: str, *, quantize_head: bool = False) -> Path:
    """Write a checkpoint of random weights below `work`, or find the one that is there.

    Args:
        work: Folder of such checkpoints; their names tell shape and scheme.
        shape: As in `read_shape`.
        scheme: As in `read_scheme`.
        quantize_head: Quantize the head too: int8, its input per token.

    Returns:
        Its folder.

    Raises:
        RequestError: the shape or scheme is unknown, or there is no head to quantize.
        CheckpointError: the disk refuses.
    """
    (name, config), of_all = read_shape(shape), read_scheme(scheme)
    tied = config.get("tie_word_embeddings", False)
    if quantize_head and (of_all.weights is None or tied):
        raise RequestError(
            f"quantize_head: found scheme {scheme} and tie_word_embeddings {tied}; a head is "
            "quantized where weights are, and where the embedding is not the head as well",
            "quantize_head",
        )
    key = json.dumps([config, of_all.model_dump(mode="json"), VERSION], sort_keys=True)
    parts = [name, scheme, *(["head8"] if quantize_head else [])]
    out = work / "-".join([*parts, hashlib.sha256(key.encode()).hexdigest()[:8]])
    if not out.exists():
        _write(out, RandomCheckpoint(shape, scheme, "cpu", quantize_head=quantize_head))
    return out


def _write(out: Path, made: RandomCheckpoint) -> None:
    """Write a checkpoint with a row of the scale table for every scale."""
    rows: list[ScaleEntry] = []
    modules = [name.removesuffix(".weight") for name in made.names() if name.endswith(".weight")]
    others = [m for m in modules if is_projection(m) and m not in made.layers]
    options = {"layers": made.layers, "ignore": others, "shard_bytes": SHARD_BYTES}
    with CheckpointWriter(out, config=made.config, scheme=made.scheme, **options) as writer:
        for name in made.names():
            module = name.removesuffix(".weight")
            if module in made.layers:
                rows += _add_linear(writer, made, module)
            else:
                writer.add(name, made.tensor(name))
        for leaf, own in (("k_offset", made.kv_offsets), ("q_moments", made.query_moments)):
            writer.set_beside({f"{name}.{leaf}": x for name, x in own.items()})
        for attention, scales in made.kv_scales.items():
            writer.set_kv_scales(attention, *scales)
            for role, scale in zip(ROLES, scales, strict=True):
                own = f"{attention}.{role[0]}_scale"
                rows.append(_row(own, role, scale, made.scheme.kv_cache, ABSMAX))
        tokenizer = words_of(int(made.config["vocab_size"])).to_str()
        settings = {"tokenizer_class": PreTrainedTokenizerFast.__name__, "unk_token": "t0"}
        settings = json.dumps(settings, indent=2) + "\n"
        files = {"tokenizer.json": tokenizer.encode(), "tokenizer_config.json": settings.encode()}
        writer.finish(ScaleTable(entries=tuple(rows)), files)


def _add_linear(
    writer: CheckpointWriter, made: RandomCheckpoint, module: str
) -> Iterator[ScaleEntry]:
    """Add a layer; gives the rows of its scales."""
    scheme, stored, name = made.layers[module], made.weights([module]), f"{module}.input_scale"
    assert scheme.weights is not None
    inputs = made.scale(name) if scheme.static_input else None
    writer.add_linear(module, stored, torch.bfloat16, input_scale=inputs)
    absmax = made.tensor(f"{module}.weight").abs().max().item()
    shown = scale_in_table(scheme.weights, stored)
    yield _row(f"{module}.weight_scale", "weight", shown, scheme.weights, absmax)
    if inputs is not None:
        yield _row(name, "input", inputs, scheme.activations, ABSMAX)


def _row(tensor: str, role: Role, scale: Tensor, spec: Any, absmax: float) -> ScaleEntry:
    statistic = "absmax" if role == "weight" else "constant"
    return unmeasured_entry(tensor, role, scale, spec.dtype, spec.granularity, absmax, statistic)
