"""What lies in a checkpoint folder beside its tensors: configuration, manifest, other files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from formats.documents import read_document
from formats.errors import CheckpointError
from formats.files import sha256_file
from formats.links import find_file
from formats.scheme import Strict
from formats.stored.other_kinds import refuse_other_kinds

CONFIG = "config.json"
MANIFEST = "quant/manifest.json"
NOT_AUXILIARY = {CONFIG, "model.safetensors.index.json", "README.md"}
AUXILIARY = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
AGAIN = "Copy the checkpoint again, or write it again"


class WrittenFile(Strict):
    """A file as it was written."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Manifest(Strict):
    """Every other file of a checkpoint, by its path in the folder."""

    files: dict[str, WrittenFile]


def auxiliary_files(folder: Path) -> tuple[Path, ...]:
    """Tokenizer, generation and licence files of a model's folder.

    Raises:
        CheckpointError: one is a link that is not followed, or no file.
    """
    names = sorted(path.name for path in folder.iterdir() if _is_auxiliary(path))
    found = (find_file(folder, name) for name in names)
    return tuple(path for path in found if path is not None)


def _is_auxiliary(path: Path) -> bool:
    if path.name in NOT_AUXILIARY or path.is_dir():
        return False
    return path.suffix in AUXILIARY or path.name.upper().startswith("LICEN")


def check_manifest(folder: Path, verify: bool) -> None:
    """Compare a folder with its manifest, if it has one: sizes of files, with `verify` all bytes.

    Raises:
        CheckpointError: a file is missing or another, or the manifest cannot be read.
    """
    manifest = read_document(folder, MANIFEST, Manifest, AGAIN)
    for name, written in manifest.files.items() if manifest else ():
        file = find_file(folder, name, MANIFEST)
        if file is None:
            raise CheckpointError(
                f"{folder}: {name} is missing; {MANIFEST} lists it. Copy the checkpoint again"
            )
        if file.stat().st_size != written.bytes:
            raise CheckpointError(
                f"{name} has {file.stat().st_size} bytes, {MANIFEST} says {written.bytes}; copy it "
                "again"
            )
        if verify and sha256_file(file) != written.sha256:
            raise CheckpointError(
                f"{name} is not what was written: its SHA-256 differs from {MANIFEST}. Copy "
                "the checkpoint again or write it again"
            )


def read_config(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json of a folder without its `quantization_config`, and that, or None.

    Raises:
        CheckpointError: there is none, it is damaged, or the model needs code of its own.
    """
    remedy = "Correct it, or copy that of the original model"
    config = read_document(path, CONFIG, dict[str, Any], remedy)
    if config is None:
        refuse_other_kinds(path)
        inner = sorted(found.parent for found in path.glob(f"*/{CONFIG}"))
        guess = f"did you mean {inner[0]}?" if inner else "is this a model folder?"
        raise CheckpointError(f"{path}: found no config.json; {guess}")
    quantization = config.pop("quantization_config", None)
    if "auto_map" in config:
        raise CheckpointError(
            f"{path / CONFIG}: the model needs code of its own (auto_map, trust_remote_code), "
            "which is never run. Convert it to an architecture that transformers knows"
        )
    if quantization is not None and not isinstance(quantization, dict):
        raise CheckpointError(f"{path / CONFIG}: quantization_config is not an object. {remedy}")
    return config, quantization
