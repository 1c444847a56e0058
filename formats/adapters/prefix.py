"""Prefix tuning as PEFT saves it: keys and values that come before every text (arXiv 2101.00190).

    adapter_config.json          num_virtual_tokens n
    adapter_model.safetensors    prompt_embeddings [n, blocks * 2 * kv heads * D]: of each block K,
                                 as it is cached after RoPE, and V (PEFT 0.21, `get_prompt`)

The first token of a text then has position n. Of a base whose K and V were divided by factors when
it was quantized (`formats.adapters.factors`), these are divided by the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from formats.adapters.lora import factors_for, open_weights
from formats.adapters.settings import AGAIN, PrefixSettings
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.family import LatentAttention
from formats.families.registry import block_names, find_family

NAME = "prompt_embeddings"


@dataclass(frozen=True)
class Prefix:
    """Keys and values of n virtual tokens, for one checkpoint.

    Attributes:
        keys: fp32 [blocks, n, kv heads * D].
        values: fp32 [blocks, n, kv heads * D].
    """

    path: Path
    keys: Tensor
    values: Tensor

    def __len__(self) -> int:
        return self.keys.shape[1]


def read_prefix(folder: Path, settings: PrefixSettings, checkpoint: Checkpoint) -> Prefix:
    """Read a prefix for a checkpoint, which is its base or was quantized from it.

    Args:
        checkpoint: What it is to run on, of a declared family whose attention has keys and values.

    Raises:
        CheckpointError: it is damaged or of another base, or cannot follow what was done to it.
    """
    family = find_family(checkpoint.config)
    assert family is not None
    names = family.attention
    assert not isinstance(names, LatentAttention)
    if names.qk_norm != "none" and checkpoint.scheme.kv_cache is not None:
        raise CheckpointError(
            f"{folder}: a prefix of the original model does not fit {checkpoint.path}: smoothing "
            "may have changed the norm of its keys, and no file says by how much. Take the model "
            "without a quantized cache, or a LoRA adapter"
        )
    factors = factors_for(folder, settings.base_model_name_or_path, checkpoint)
    blocks, file = block_names(checkpoint.config), open_weights(folder)
    found = file.tensor(NAME).float() if NAME in file.tensors else torch.empty(0)
    keys, values = [], []
    _, key, value = names.qkv
    width = checkpoint.weight_shape(f"{blocks[0]}.{names.module}.{key}")[0]
    tokens = settings.num_virtual_tokens
    if tuple(found.shape) != (tokens, 2 * len(blocks) * width):
        raise CheckpointError(
            f"{folder}: {NAME} is {list(found.shape)}; needed is [{tokens}, "
            f"{2 * len(blocks) * width}], of each of {len(blocks)} blocks {width} numbers of K and "
            f"{width} of V. It is of another base, or damaged. {AGAIN}"
        )
    if not bool(torch.isfinite(found).all()):
        raise CheckpointError(f"{folder}: {NAME} holds NaN or infinity. {AGAIN}")
    for block, own in zip(blocks, found.view(tokens, len(blocks), 2, width).unbind(1), strict=True):
        for kept, part, x in zip((keys, values), (key, value), own.unbind(1), strict=True):
            divisor = factors.output_divisor(f"{block}.{names.module}.{part}", width)
            kept.append((x.double() / divisor).float())
    return Prefix(folder, torch.stack(keys), torch.stack(values))
