"""What lies in a checkpoint folder beside its tensors: configuration, manifest, other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from formats.errors import CheckpointError
from formats.files import safe_join, sha256_file

MANIFEST = "quant/manifest.json"
NOT_AUXILIARY = {"config.json", "model.safetensors.index.json", "README.md"}
AUXILIARY = {".json", ".txt", ".model", ".jinja", ".tiktoken"}


def auxiliary_files(folder: Path) -> tuple[Path, ...]:
    """Tokenizer, generation and licence files of a model's folder."""
    return tuple(
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.name not in NOT_AUXILIARY
        and (path.suffix in AUXILIARY or path.name.upper().startswith("LICEN"))
    )


def check_manifest(folder: Path, verify: bool) -> None:
    """Compare a folder with its manifest, if it has one: sizes of files, with `verify` all bytes.

    Raises:
        CheckpointError: a file is missing or another, or the manifest cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return
    try:
        files = json.loads(path.read_bytes())["files"]
        rows = {name: (row["bytes"], row["sha256"]) for name, row in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST}: cannot be read ({error!r})") from error
    for name, (size, digest) in rows.items():
        file = safe_join(folder, name, MANIFEST)
        if not file.is_file():
            raise CheckpointError(
                f"{folder}: {name} is missing; {MANIFEST} lists it. Copy the checkpoint again"
            )
        if file.stat().st_size != size:
            raise CheckpointError(
                f"{name} has {file.stat().st_size} bytes, {MANIFEST} says {size}; copy it again"
            )
        if verify and sha256_file(file) != digest:
            raise CheckpointError(
                f"{name} is not what was written: its SHA-256 differs from {MANIFEST}. Copy "
                "the checkpoint again or write it again"
            )


def read_config(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json of a folder without its `quantization_config`, and that, or None.

    Raises:
        CheckpointError: there is none, it is damaged, or the model needs code of its own.
    """
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
        quantization = config.pop("quantization_config", None)
    except FileNotFoundError as error:
        inner = sorted(found.parent for found in path.glob("*/config.json"))
        guess = f"did you mean {inner[0]}?" if inner else "is this a model folder?"
        raise CheckpointError(f"{path}: found no config.json; {guess}") from error
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{file}: not a JSON object ({error})") from error
    if "auto_map" in config:
        raise CheckpointError(
            f"{file}: the model needs code of its own (auto_map, trust_remote_code), which is "
            "never run. Convert it to an architecture that transformers knows"
        )
    if quantization is not None and not isinstance(quantization, dict):
        raise CheckpointError(f"{file}: quantization_config is not an object")
    return config, quantization
