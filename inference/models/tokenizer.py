"""The tokenizer of a checkpoint, and the tokens that end its texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError


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
