"""The two layouts in which EAGLE-3 heads are published, and what they say.

The authors' (Li et al. 2025, arXiv 2503.01840; SpecForge writes it, too) has a config.json of a
Llama of one block, whose tensors are named `midlayer.*`. That of the library `speculators` keeps
the block's settings under `transformer_layer_config`, and calls it `layers.0.*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError
from formats.families.declared.llama import FAMILY as LLAMA
from inference.models.config import ModelConfig

BLOCKS = ("midlayer", "layers.0")
ATTENTION = "self_attn"


@dataclass(frozen=True)
class EagleSettings:
    """What a head says of itself.

    Attributes:
        shape: Of its one block.
        block: The full name of that.
        taps: Blocks of the model whose inputs it reads, the number of blocks for the last output.
        residual_is_normed: Whether what the block adds to is its norm of the hidden state, and not
            the hidden state itself.
        vocabulary: Its logits.
    """

    shape: ModelConfig
    block: str
    taps: tuple[int, ...]
    residual_is_normed: bool
    vocabulary: int


def read_settings(checkpoint: Checkpoint, target: ModelConfig) -> EagleSettings:
    """Read and check what a head says of itself.

    Args:
        checkpoint: The head.
        target: The shape of the model that it drafts for.

    Raises:
        CheckpointError: it is no head of EAGLE-3's kind, or damaged.
        EngineError: it was trained for a model of another shape.
    """
    said, name = checkpoint.config, checkpoint.path
    inner = said.get("transformer_layer_config", said)
    block = next((b for b in BLOCKS if _has(checkpoint, f"{b}.{ATTENTION}.q_proj")), None)
    if block is None or not _has(checkpoint, "fc"):
        raise CheckpointError(
            f"{name} is no EAGLE-3 head: it has no layer fc, or no block {' or '.join(BLOCKS)}. A "
            "whole model drafts as draft=PATH; heads of EAGLE and EAGLE-2 are not run"
        )
    if inner.get("num_hidden_layers", 1) != 1:
        raise CheckpointError(
            f"{name}: config.json gives num_hidden_layers {inner['num_hidden_layers']}; heads of "
            "one block are run"
        )
    shape = ModelConfig.of({"model_type": LLAMA.model_types[0], **inner})
    sizes = {
        "target_hidden_size": (said.get("target_hidden_size", shape.hidden_size), "hidden_size"),
        "vocab_size": (shape.vocab_size, "vocab_size"),
    }
    for key, (found, of_target) in sizes.items():
        if found != getattr(target, of_target):
            raise EngineError(
                f"speculate: the head {name} was trained for another model: its {key} is {found}, "
                f"and the model's {of_target} {getattr(target, of_target)}. Take one that was "
                "trained for this model"
            )
    taps = _taps(said, target.layers)
    if not taps or not all(0 <= tap <= target.layers for tap in taps):
        raise EngineError(
            f"speculate: the head {name} reads what blocks {list(taps)} of its model read, and the "
            f"model has {target.layers}. Take a head that was trained for this model"
        )
    _check_shapes(checkpoint, shape, block, len(taps) * target.hidden_size)
    return EagleSettings(
        shape=shape,
        block=block,
        taps=taps,
        residual_is_normed=bool(said.get("norm_before_residual", False)),
        vocabulary=checkpoint.weight_shape("lm_head")[0],
    )


def _has(checkpoint: Checkpoint, module: str) -> bool:
    return f"{module}.weight" in checkpoint or module in checkpoint.quantized_modules


def _taps(said: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The blocks that are named, or those that the authors' code takes: low, middle and high."""
    key = "eagle_aux_hidden_state_layer_ids"
    named = said.get(key) or said.get("eagle_config", {}).get(key)
    return tuple(named) if named else (2, layers // 2, layers - 3)


def _check_shapes(checkpoint: Checkpoint, shape: ModelConfig, block: str, read: int) -> None:
    """Compare a head's weights with its settings.

    Raises:
        CheckpointError: one differs; it is named.
    """
    hidden, middle = shape.hidden_size, f"{block}.{ATTENTION}"
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    wanted = {
        "fc": (hidden, read),
        f"{middle}.q_proj": (queries, 2 * hidden),
        f"{middle}.k_proj": (keys, 2 * hidden),
        f"{middle}.v_proj": (keys, 2 * hidden),
        f"{middle}.o_proj": (hidden, queries),
        "lm_head": (checkpoint.weight_shape("lm_head")[0], hidden),
    }
    for module, (rows, columns) in wanted.items():
        found = checkpoint.weight_shape(module)
        if found != (rows, columns):
            raise CheckpointError(
                f"{checkpoint.path}: {module}.weight is {list(found)}, and its settings want "
                f"[{rows}, {columns}]. It is damaged, or its config.json is another's"
            )
