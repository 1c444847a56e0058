"""The tokenizer of a checkpoint, and the tokens that end its texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from formats.checkpoint.read import Checkpoint
from formats.documents import read_document
from formats.errors import CheckpointError
from formats.families.values import GenerationValues
from formats.modeling.config import defer_activations
from formats.published.tokenizers import (
    COMPLETE,
    SENTENCEPIECE,
    SETTINGS,
    native_settings,
    needs_code,
)
from formats.stored.folder import auxiliary_files

GENERATION = "generation_config.json"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
SUFFIXES = (".model", ".tiktoken")
REMEDY = "Copy it again from the original model"


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder holds a vocabulary, damaged or not."""
    return any(file.name in VOCABULARIES or file.suffix in SUFFIXES for file in folder.iterdir())


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model's folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from transformers import AutoTokenizer

    defer_activations()
    if not has_tokenizer(folder):
        raise _unusable(folder, f"there is none: no {', '.join(VOCABULARIES)}")
    try:
        with _without_code(folder) as readable:
            tokenizer = AutoTokenizer.from_pretrained(
                readable, local_files_only=True, trust_remote_code=False
            )
        tokenizer("a b")  # damaged settings may show no sooner
        words = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    except CheckpointError:
        raise
    except Exception as error:  # of any kind: tokenizers raises nothing but Exception itself
        raise _unusable(folder, f"{type(error).__name__}: {error}") from error
    if not words:  # what transformers makes of settings without a vocabulary
        raise _unusable(folder, "its vocabulary is empty")
    return tokenizer


@contextmanager
def _without_code(folder: Path) -> Iterator[Path]:
    """A folder with the same tokenizer, its settings those of a class of transformers."""
    if not needs_code(folder):
        yield folder
        return
    settings = native_settings(folder)
    if settings is None:
        raise CheckpointError(
            f"{folder}: its tokenizer needs code of its own (auto_map of {SETTINGS}), which is "
            "never run. Put a tokenizer.json of the same vocabulary beside the weights, such as "
            "that of a conversion of the model to transformers' own classes (GLM-4-9B-chat: "
            "zai-org/glm-4-9b-chat-hf)"
        )
    if not (folder / COMPLETE).exists() and find_spec("sentencepiece") is None:
        raise _unusable(folder, f"{SENTENCEPIECE} is read by `pip install sentencepiece protobuf`")
    with TemporaryDirectory() as made:
        for file in auxiliary_files(folder):
            shutil.copyfile(file, Path(made, file.name))
        Path(made, SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
        yield Path(made)


def _unusable(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: its tokenizer cannot be loaded; put the original model's tokenizer files, "
        "tokenizer.json and tokenizer_config.json, beside the weights "
        f"({' '.join(reason.split())[:200]})"
    )


def end_tokens(checkpoint: Checkpoint, tokenizer: Any) -> frozenset[int]:
    """End tokens that config.json, generation_config.json and the tokenizer name."""
    named: list[Any] = [checkpoint.config.get("eos_token_id"), tokenizer.eos_token_id]
    generation = read_document(checkpoint.path, GENERATION, GenerationValues, REMEDY)
    if generation is not None:
        named.append(generation.eos_token_id)
    flat = [t for value in named for t in (value if isinstance(value, list) else [value])]
    return frozenset(token for token in flat if token is not None)
