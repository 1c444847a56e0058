"""A quantized checkpoint in transformers' own code: its numbers, rounded by hand, no kernel of ours.

Weights are the dequantized ones; the inputs of their products, and K and V, are rounded as the
checkpoint says and stay floats. What our engine makes of the same checkpoint is told from this only
by the order of its sums, and by roundings that fall the other way for it.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from formats.cache_scheme import CacheRole, KVCacheSpec
from formats.checkpoint.join import MergedLayers
from formats.checkpoint.native import as_stored
from formats.checkpoint.read import Checkpoint
from formats.families.block_layers import block_of
from formats.families.family import LatentAttention
from formats.families.registry import find_family
from formats.families.sizes import latent_sizes
from formats.modeling.layers import attention_of_blocks, structure_of
from kernels.numerics import INT4, TYPES, dequantize, fake_quantize, fake_quantize_activations
from kernels.packed_cache import compensated, feedback_of, token_scales, turn_size, turned

ATTENTION = "tests_fake_quantized"
LEAVES = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
PRODUCTS = (torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


def fake_quantized_logits(checkpoint: Checkpoint, ids: Tensor) -> Tensor:
    """Logits fp32 [T, vocabulary] of a quantized checkpoint, its cache quantized too.

    Args:
        checkpoint: As our quantization writes it.
        ids: Of one text [T].
    """
    with tempfile.TemporaryDirectory() as folder:
        write_float(checkpoint, Path(folder))
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager).eval()
    if checkpoint.scheme.kv_cache is not None:
        model.set_attn_implementation(ATTENTION)
        names = _caches(checkpoint)
        for path, module in model.named_modules():
            index = getattr(module, "layer_idx", None)
            if hasattr(module, "layer_idx") and index is None:  # its block's code says it (Zamba)
                index = int(str(block_of(f"{path}.q")).rpartition(".")[2])
            name = None if index is None else names[index]
            if name is not None:
                static = checkpoint.kv_scales.get(name, (None, None))
                module.fake_cache = checkpoint.kv_scheme_of(name), *static
                module.fake_offset = checkpoint.kv_offsets.get(name)
                module.fake_moments = checkpoint.query_moments.get(name)
                _round_latents(module, checkpoint)
    with torch.no_grad(), RoundedInputs(checkpoint, model):
        return model(ids[None]).logits[0].float()


def _caches(checkpoint: Checkpoint) -> list[str | None]:
    """The attention module of each block whose cache it reads."""
    if find_family(checkpoint.config) is not None:
        return list(attention_of_blocks(checkpoint.config))
    sites = [block.attention for block in structure_of(checkpoint.config).blocks]
    return [site and (site.lender or site.module) for site in sites]


def write_float(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a checkpoint with the dequantized weights, named as the original's files name them."""
    tensors: dict[str, Tensor] = {}
    for name in checkpoint.names():
        module, _, leaf = name.rpartition(".")
        if module not in checkpoint.quantized_modules or leaf not in (*LEAVES, "input_scale"):
            tensors[name] = checkpoint.tensor(name)
        elif leaf == "weight_scale":
            tensors[f"{module}.weight"] = dequantized(checkpoint, module)
    merged = MergedLayers(checkpoint.config)
    tensors = dict(pair for item in tensors.items() for pair in merged.add(*item))
    tensors = {name: as_stored(name, x, checkpoint.config) for name, x in tensors.items()}
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    same = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(same, folder / "model.safetensors", metadata={"format": "pt"})


def dequantized(checkpoint: Checkpoint, module: str) -> Tensor:
    """A layer's weight as it is multiplied: fp32 [out, in]."""
    stored, spec = checkpoint.weight(module), checkpoint.scheme_of(module).weights
    assert spec is not None
    return dequantize(stored.q, stored.scale, stored.zero_point, spec.block)


class RoundedInputs(TorchFunctionMode):
    """While it is entered, whatever a quantized weight is multiplied by is rounded before.

    Weights are found in the model by their first output's row, so that it does not matter whether
    transformers holds them merged, stacked or turned.
    """

    def __init__(self, checkpoint: Checkpoint, model: nn.Module) -> None:
        super().__init__()
        modules = checkpoint.quantized_modules
        rows = {_key(dequantized(checkpoint, module)[0]): module for module in modules}
        self._seen = {
            place: partial(rounded, checkpoint, rows[key])
            for parameter in model.parameters()
            for place, key in _places(parameter)
            if key in rows
        }
        assert self._seen or not checkpoint.quantized_modules, (
            "no quantized weight was found in transformers' model"
        )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        if func is torch.addmm and (seen := self._seen.get(args[2].data_ptr())):
            args = (args[0], seen(args[1]), args[2])
        elif func in PRODUCTS and (seen := self._seen.get(args[1].data_ptr())):
            args = (seen(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _places(parameter: Tensor) -> Iterator[tuple[int, bytes]]:
    """Where each matrix of a parameter lies, and what tells it: its first row, or first column."""
    for matrix in parameter.unbind() if parameter.dim() == 3 else (parameter,):
        if matrix.dim() == 2:
            yield matrix.data_ptr(), _key(matrix[0])
            yield matrix.data_ptr(), _key(matrix[:, 0])


def _key(row: Tensor) -> bytes:
    return row.detach().float().numpy().tobytes()


def rounded(checkpoint: Checkpoint, module: str, x: Tensor) -> Tensor:
    """A layer's input [..., in] as its kernel sees it."""
    spec = checkpoint.scheme_of(module).activations
    if spec is None:
        return x
    scale = None if spec.dynamic else checkpoint.tensor(f"{module}.input_scale").float()
    return fake_quantize_activations(x, scale, TYPES[spec.dtype], spec.group)


def cached(x: Tensor, spec: KVCacheSpec, role: CacheRole, scale: Tensor | None) -> Tensor:
    """K or V [1, heads, tokens, D] as the cache gives it back; scales [heads] or [heads, D]."""
    kind = TYPES[spec.dtype_of(role)]
    if scale is None and kind is INT4:
        return fake_quantize(x, token_scales(x).float(), kind)
    if scale is None:
        return fake_quantize_activations(x, None, kind)
    by_channel = scale.reshape(len(scale), 1, -1)  # [heads, 1, 1 or D]
    return fake_quantize(x, by_channel.expand(-1, *x.shape[2:])[None], kind)


def cached_keys(
    k: Tensor,
    spec: KVCacheSpec,
    scale: Tensor | None,
    offset: Tensor | None,
    moments: Tensor | None,
) -> Tensor:
    """K as the cache gives it back, turned back and with what was subtracted."""
    size = turn_size(k.shape[-1]) if spec.rotate_keys else 1
    taken = torch.zeros(()) if offset is None else turned(offset[None, :, None], size)
    moved = turned(k.float(), size) - taken
    if moments is None:
        seen = cached(moved, spec, "k_cache", scale)
    else:
        scales = token_scales(moved).float()
        q = compensated(moved.transpose(1, 2), scales.transpose(1, 2), feedback_of(moments, size))
        seen = q.transpose(1, 2) * scales
    return turned(seen + taken, size)


def _round_latents(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Round what the latent's norm gives, where an attention module caches that in place of V."""
    family = find_family(checkpoint.config)
    if family is None or not isinstance(family.attention, LatentAttention):
        return
    spec, _, scale = module.fake_cache
    module.rotated_size = latent_sizes(checkpoint.config).rotated
    module.get_submodule(family.attention.kv_norm).register_forward_hook(
        lambda _, __, latent: cached(latent[:, None], spec, "v_cache", scale)[:, 0]
    )


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
):
    """The eager attention of a model's own code, over K and V as the cache gives them back."""
    spec, k_scale, v_scale = module.fake_cache
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if (size := getattr(module, "rotated_size", None)) is not None:
        key = torch.cat((key[..., :-size], cached(key[..., -size:], spec, "k_cache", k_scale)), -1)
    else:
        key = cached_keys(key, spec, k_scale, module.fake_offset, module.fake_moments)
        value = cached(value, spec, "v_cache", v_scale)
    return eager(module, query, key, value, *args, **kwargs)


def _layer(attention: str) -> int:
    return next(int(part) for part in attention.split(".") if part.isdecimal())


AttentionInterface.register(ATTENTION, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
