"""Random weights of a shape and a scheme: the speed of a model without the model.

Weights are Gaussian and seeded, norms are ones, biases zeros; quantized layers are rounded to
nearest. Static scales of inputs and of the cache are one constant. The tokens of such a model mean
nothing, its times are those of a real one. `RandomCheckpoint` is stored nowhere: its tensors are
made on the device where they are read.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from formats.cache_scheme import KVCacheSpec
from formats.checkpoint.kv_scales import Sinks
from formats.checkpoint.part import Cut, Span, cut_shape
from formats.checkpoint.read import Checkpoint
from formats.checkpoint.split import split_shapes
from formats.families.names import EMBEDDING, HEAD, expert_of, is_projection, is_weight_only
from formats.families.registry import attention_names, find_family
from formats.families.sizes import cached_of
from formats.scheme import ActivationSpec, LayerScheme, Scheme
from formats.stored.weights import StoredWeight, storage_format
from inference.bench.shapes import PUBLISHED, read_scheme, read_shape
from kernels.numerics import (
    TYPES,
    block_absmax,
    block_view,
    choose_affine,
    choose_power,
    choose_scale,
    e4m3_multiples,
    e4m3_unit,
    pad_to_blocks,
    quantize,
)
from kernels.two_level import choose_unit, nearest_multiples

DEVIATION = 0.02
ABSMAX = 4.0  # of inputs and of cached K and V, where their scale is static
ROLES: tuple[Literal["k_cache"], Literal["v_cache"]] = ("k_cache", "v_cache")
HEAD_PRESET = "a8w8_dynamic"


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors, as transformers has them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return split_shapes(shapes, config)


def quantized_layers(
    shapes: Mapping[str, tuple[int, ...]],
    scheme: Scheme,
    experts: LayerScheme | None = None,
) -> dict[str, LayerScheme]:
    """Schemes of the blocks' quantized layers, in the largest groups that fit them.

    `experts` have one of their own, or None.
    """
    modules = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
    own = scheme.of_layers
    layers = {
        m: (own.weights_alone if is_weight_only(m) else own).opened.fitted(
            shapes[f"{m}.weight"][-1]
        )
        for m in modules
        if own.weights and is_projection(m)
    }
    if experts is not None:
        layers |= {m: experts for m in modules if expert_of(m) is not None}
    return layers


def random_values(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A tensor of a model, bf16, where the generator is: Gaussian; norms are ones, biases zeros."""
    if len(size) > 1:
        values = torch.randn(size, generator=generator, device=generator.device)
        return values.mul_(DEVIATION).bfloat16()
    return torch.full(
        size, float(name.endswith(".weight")), dtype=torch.bfloat16, device=generator.device
    )


def constant_input_scale(inputs: ActivationSpec) -> Tensor:
    """The scale of a static input, fp32 [1]."""
    return choose_scale(torch.tensor([ABSMAX]), TYPES[inputs.dtype])


def round_to_nearest(weight: Tensor, scheme: LayerScheme) -> StoredWeight:
    """Round [N, K], or several [n, N, K], to nearest.

    Scales of packed weights are bf16's, as they are stored in it.
    """
    spec = scheme.weights
    assert spec is not None
    kind, zero_point = TYPES[spec.dtype], None
    block = (1,) * (weight.dim() - 2) + spec.block
    if spec.scale_type == "e8m0":
        scale = choose_power(block_absmax(weight, block), kind)
    elif spec.symmetric:
        scale = choose_scale(block_absmax(weight, block), kind)
    else:
        blocks = block_view(pad_to_blocks(weight, block), block)
        inner = tuple(range(1, blocks.dim(), 2))
        scale, zero_point = choose_affine(blocks.amin(inner), blocks.amax(inner), kind)
    if storage_format(scheme) == "pack-quantized":
        scale = scale.bfloat16().float()
    if spec.scale_type == "e4m3":
        scale = e4m3_multiples(scale, e4m3_unit(scale.max()))
    if spec.two_level:
        unit = choose_unit(scale)
        scale = nearest_multiples(scale, unit) * unit
    q = quantize(weight, scale, kind, zero_point, block)
    return StoredWeight(q, scale, zero_point)


def kv_scales(config: dict[str, Any], scheme: Scheme) -> dict[str, tuple[Tensor, Tensor]]:
    """Constant scales of K and V by attention module; none where the cache has no static ones."""
    spec = scheme.kv_cache
    if spec is None or spec.dynamic:
        return {}
    own = cached_of(find_family(config), config)
    k, v = (
        spec.scale_shape(role, own.heads, size, latent=own.latent)
        for role, size in zip(ROLES, (own.k, own.v), strict=True)
    )
    kinds = [TYPES[spec.dtype_of(role)] for role in ROLES]
    return {
        name: (
            choose_scale(torch.full(k, ABSMAX), kinds[0]),
            choose_scale(torch.full(v, ABSMAX), kinds[1]),
        )
        for name in attention_names(config)
    }


def kv_offsets(config: dict[str, Any], scheme: Scheme) -> dict[str, Tensor]:
    """What is subtracted from K, 0, by attention module; none where keys are not centred."""
    if scheme.kv_cache is None or not scheme.kv_cache.center_keys:
        return {}
    own = cached_of(find_family(config), config)
    return {name: torch.zeros(own.heads, own.k) for name in attention_names(config)}


def words_of(vocabulary: int) -> Tokenizer:
    """A tokenizer that has a word for every token, such as `t17`: what it decodes, it encodes."""
    words = {f"t{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


class RandomCheckpoint(Checkpoint):
    """A checkpoint of random weights in no file: its tensors are made when they are read.

    Args:
        shape: As in `read_shape`.
        scheme: As in `read_scheme`.
        device: Where tensors are made.
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
        self._device, self._shapes = device, tensor_shapes(config)
        experts, of_head = PUBLISHED.get(shape), read_scheme(head).of_layers
        self._shares_head = quantize_head and f"{HEAD}.weight" not in self._shapes
        if self._shares_head:
            self._shapes[f"{HEAD}.weight"] = self._shapes.pop(f"{EMBEDDING}.weight")
        rest = {HEAD: of_head} if quantize_head else {}
        layers = quantized_layers(self._shapes, self.scheme, experts)
        if layers and self.scheme.of_layers not in layers.values():  # only experts, or no 128 fits
            first = next(iter(layers.values()))
            self.scheme = self.scheme.model_copy(update={"weights": first.weights})
        self.layers = layers | rest
        self.quantized_modules, self.scale_table = tuple(sorted(self.layers)), None
        self.kv_scales = kv_scales(config, self.scheme)
        self.kv_offsets = kv_offsets(config, self.scheme)

    def __contains__(self, name: str) -> bool:
        module, _, leaf = name.rpartition(".")
        if module in self.layers and leaf == "input_scale":
            return self.layers[module].static_input
        return name in self._shapes and (leaf != "weight" or module not in self.layers)

    def reorders_inputs(self, module: str) -> bool:
        """No layer's inputs are in another order."""
        return False

    @property
    def shares_head(self) -> bool:
        """Whether the quantized head is the embedding, too."""
        return self._shares_head

    def names(self) -> tuple[str, ...]:
        """All tensors of the model, as they are before layers are quantized."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        """A random tensor: the same each time."""
        return random_values(name, self._shapes[name], self._generator(name))

    def tensors(self, names: Sequence[str]) -> Tensor:
        """Weights that are not quantized, or scales of static inputs, as one."""
        if names[0].endswith(".input_scale"):
            return self.scale(names[0]).repeat(len(names))
        return _below(self._drawn(names))

    def weights(self, modules: Sequence[str], device: torch.device | str = "cpu") -> StoredWeight:
        """Random quantized weights as one; they are where tensors are made."""
        scheme = self.layers[modules[0]]
        drawn = self._drawn([f"{module}.weight" for module in modules])
        made = [round_to_nearest(values.float(), scheme) for values in drawn]
        zeros = [part.zero_point for part in made if part.zero_point is not None]
        q, scale = _below(part.q for part in made), _below(part.scale for part in made)
        return StoredWeight(q, scale, _below(zeros) if zeros else None)

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
            yield random_values(alike[0], (len(alike), *shape), self._generator(alike[0]))

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))

    def weight_shape(self, module: str) -> tuple[int, ...]:
        """Outputs and inputs of a linear layer."""
        return self._shapes[f"{module}.weight"]

    def scheme_of(self, module: str) -> LayerScheme:
        """How a linear layer is quantized."""
        return self.layers.get(module) or LayerScheme()

    def kv_scheme_of(self, attention: str) -> KVCacheSpec | None:
        """How the cache is quantized: alike in all blocks."""
        return self.scheme.kv_cache

    def scale(self, name: str) -> Tensor:
        """The scale of a static input."""
        inputs = self.layers[name.rpartition(".")[0]].activations
        assert inputs is not None
        return constant_input_scale(inputs)

    @property
    def nbytes(self) -> int:
        """0: nothing is on a disk."""
        return 0


def _below(parts: Iterable[Tensor]) -> Tensor:
    """Parts [how many, rows, columns] as rows below each other."""
    rows = [part.flatten(0, 1) for part in parts]
    if len(rows) == 1:
        return rows[0]
    out = rows[0].new_empty((sum(map(len, rows)), rows[0].shape[1]))
    for place, part in zip(out.split([len(part) for part in rows]), rows, strict=True):
        place.copy_(part)  # e4m3 too, of which not every torch can join some
    return out


def random_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of a random model."""
    return PreTrainedTokenizerFast(tokenizer_object=words_of(vocabulary), unk_token="t0")
