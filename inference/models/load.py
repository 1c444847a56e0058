"""From a checkpoint to a model that runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError
from formats.scheme import KVCacheSpec
from inference.config import EngineConfig
from inference.models.decoder import LlamaModel
from inference.models.kv_cache import make_pool
from inference.models.layers import Placement
from inference.models.memory import OF_CACHE, OF_WEIGHTS, memory_for
from kernels.attention_inputs import KV_BLOCK, KVPool
from kernels.devices import check_device
from kernels.numerics import TYPES


def load_model(
    checkpoint: Checkpoint | str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    triton: bool | None = None,
) -> LlamaModel:
    """Load a float or quantized checkpoint.

    Args:
        checkpoint: The checkpoint or its folder.
        device: Where it runs.
        dtype: Type of activations and of float weights; by default fp32 on a CPU, on a GPU the
            16-bit type of the checkpoint, or bf16.
        triton: Run the GPU kernels; by default on a GPU. On a CPU they need Triton's interpreter.

    Raises:
        CheckpointError: it is damaged, or of a kind that is not run here.
        EngineError: the device is not one that is run on, or its memory is too small.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint.open(checkpoint)
    place = require_device(device)
    triton = place.type == "cuda" if triton is None else triton
    dtype = dtype or (half_type(checkpoint) if triton else torch.float32)
    with memory_for("loading the weights", place, checkpoint.nbytes, OF_WEIGHTS):
        return LlamaModel(checkpoint, Placement(place, dtype, triton))


def require_device(device: torch.device | str) -> torch.device:
    """`kernels.devices.check_device`.

    Raises:
        EngineError: the device is not one that is run on.
    """
    try:
        return check_device(device)
    except ValueError as error:
        raise EngineError(f"device: {error}") from error


def half_type(checkpoint: Checkpoint) -> torch.dtype:
    """fp16 for a checkpoint in it, else bf16."""
    own = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return torch.float16 if own == "float16" else torch.bfloat16


def make_cache(
    checkpoint: Checkpoint, model: LlamaModel, config: EngineConfig, spec: KVCacheSpec | None
) -> list[KVPool]:
    """Allocate the cache of a model, a pool for each layer.

    Args:
        checkpoint: Has the static scales.
        model: Whose it is.
        config: Sizes, resolved.
        spec: How K and V are quantized, or None.

    Raises:
        EngineError: the model's kernels do not take such a cache, or memory is too small.
    """
    place, shape = model.place, model.config
    chosen = place.dtype if config.kv_dtype is None else getattr(torch, config.kv_dtype)
    if place.triton and spec is None and chosen != place.dtype:
        raise EngineError(
            f"kv_dtype: found {config.kv_dtype}; on a GPU a cache that is not quantized has the "
            f"model's type, {str(place.dtype).removeprefix('torch.')}. Leave it out"
        )
    assert config.kv_blocks is not None
    size = (config.kv_blocks, shape.kv_heads, KV_BLOCK, shape.head_dim)
    names = (f"model.layers.{i}.self_attn" for i in range(shape.layers))
    width = (chosen if spec is None else TYPES[spec.dtype].storage).itemsize
    nbytes = 2 * math.prod(size) * width * shape.layers
    what = f"a cache of {config.kv_blocks} blocks of {KV_BLOCK} tokens"
    with memory_for(what, place.device, nbytes, OF_CACHE):
        pools = [make_pool(size, chosen, spec, checkpoint.kv_scales.get(n), place) for n in names]
    if place.triton:
        _check_pools(pools)
    return pools


def _check_pools(pools: list[KVPool]) -> None:
    """Raise EngineError now where the GPU's kernels would refuse a cache at the first step."""
    from kernels.triton.attention.paged_cache import check_pages  # needs Triton

    try:
        for pool in pools:
            check_pages(pool.k, pool.v, pool.k_scale, pool.v_scale)
    except ValueError as error:
        raise EngineError(
            f"the GPU's kernels do not take this model's cache: {error}; quantized_kv=False gives "
            "it the model's type, device cpu runs any"
        ) from error


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model's folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be loaded; put the model's tokenizer files, such as "
            f"tokenizer.json, beside the weights ({' '.join(str(error).split())[:200]})"
        ) from error


def end_tokens(checkpoint: Checkpoint, tokenizer: Any) -> frozenset[int]:
    """End tokens that config.json, generation_config.json and the tokenizer name."""
    named: list[Any] = [checkpoint.config.get("eos_token_id"), tokenizer.eos_token_id]
    generation = checkpoint.path / "generation_config.json"
    if generation.is_file():
        named.append(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
    flat = [t for value in named for t in (value if isinstance(value, list) else [value])]
    return frozenset(token for token in flat if token is not None)
