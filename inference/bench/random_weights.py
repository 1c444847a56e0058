"""Random weights of a shape and a scheme: the speed of a model without the model.

Weights are Gaussian and seeded, norms are ones, biases zeros; quantized layers are rounded to
nearest. Static scales of inputs and of the cache are one constant. The tokens of such a model mean
nothing, its times are those of a real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from formats.checkpoint.split import split_shapes
from formats.families.names import expert_of, is_projection, is_weight_only
from formats.families.registry import attention_names, find_family
from formats.families.sizes import cached_of
from formats.scheme import ActivationSpec, LayerScheme, Scheme
from formats.stored.weights import StoredWeight, storage_format
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
