"""Random weights of a shape and a scheme: the speed of a model without the model.

Weights are Gaussian and seeded, norms are ones, biases zeros; quantized layers are rounded to
nearest. Static scales of inputs and of the cache are one constant. The tokens of such a model mean
nothing, its times are those of a real one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from formats.checkpoint.split import split_shapes
from formats.families.names import HEAD, expert_of, is_projection, is_weight_only
from formats.families.registry import attention_names, find_family
from formats.families.sizes import cached_of
from formats.scheme import MX_GROUP, PRESETS, ActivationSpec, LayerScheme, Scheme
from formats.stored.weights import StoredWeight, storage_format
from kernels.numerics import (
    TYPES,
    block_absmax,
    block_view,
    choose_affine,
    choose_scale,
    pad_to_blocks,
    quantize,
)
from kernels.two_level import choose_unit, nearest_multiples

DEVIATION = 0.02
ABSMAX = 4.0  # of inputs and of cached K and V, where their scale is static
ROLES: tuple[Literal["k_cache"], Literal["v_cache"]] = ("k_cache", "v_cache")
HEAD_SCHEME = PRESETS["a8w8_dynamic"].of_layers


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors, as transformers has them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return split_shapes(shapes, config)


def quantized_layers(
    tensors: Iterable[str],
    scheme: Scheme,
    quantize_head: bool,
    experts: LayerScheme | None = None,
) -> dict[str, LayerScheme]:
    """Schemes of the linear layers that are quantized; `experts` have one of their own, or None."""
    modules = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    own = scheme.of_layers
    layers = {
        m: own.weights_alone if is_weight_only(m) else own
        for m in modules
        if own.weights and is_projection(m)
    }
    if experts is not None:
        layers |= {m: experts for m in modules if expert_of(m) is not None}
    return layers | ({HEAD: HEAD_SCHEME} if quantize_head else {})


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
    if spec.dtype == "fp4_e2m1":
        return _powers_of_two(weight)
    kind, zero_point = TYPES[spec.dtype], None
    block = (1,) * (weight.dim() - 2) + spec.block
    if spec.symmetric:
        scale = choose_scale(block_absmax(weight, block), kind)
    else:
        blocks = block_view(pad_to_blocks(weight, block), block)
        inner = tuple(range(1, blocks.dim(), 2))
        scale, zero_point = choose_affine(blocks.amin(inner), blocks.amax(inner), kind)
    if storage_format(scheme) == "pack-quantized":
        scale = scale.bfloat16().float()
    if spec.two_level:
        unit = choose_unit(scale)
        scale = nearest_multiples(scale, unit) * unit
    q = quantize(weight, scale, kind, zero_point, block)
    return StoredWeight(q, scale, zero_point)


def _powers_of_two(weight: Tensor) -> StoredWeight:
    """[..., N, K] in MXFP4: scales from the largest exponent (OCP Microscaling 1.0, 6.3)."""
    groups = weight.unflatten(-1, (-1, MX_GROUP))
    scale = torch.exp2(groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2)
    elements = groups / scale[..., None]
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=weight.device)
    nearest = torch.bucketize(elements.abs(), (values[1:] + values[:-1]) / 2)
    q = values[nearest].copysign(elements).flatten(-2)
    return StoredWeight(q.to(torch.float8_e4m3fn), scale)


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
    kind = TYPES[spec.dtype]
    return {
        name: (choose_scale(torch.full(k, ABSMAX), kind), choose_scale(torch.full(v, ABSMAX), kind))
        for name in attention_names(config)
    }


def words_of(vocabulary: int) -> Tokenizer:
    """A tokenizer that has a word for every token, such as `t17`: what it decodes, it encodes."""
    words = {f"t{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer
