"""What else people give as a model, by its kind: other runtimes' files, pickled weights."""

from __future__ import annotations

from pathlib import Path

from formats.errors import CheckpointError
from formats.hub import model_folder

OTHERS = {".gguf": "GGUF", ".ggml": "GGML", ".onnx": "ONNX"}
PICKLES = {".bin", ".pt", ".pth", ".ckpt"}


def locate_folder(name: str | Path, revision: str | None = None) -> Path:
    """`formats.hub.model_folder`, but a file of another kind is refused as what it is.

    Raises:
        CheckpointError: there is no such folder or model, or it cannot be had.
    """
    if Path(name).exists() and not Path(name).is_dir():
        refuse_other_kinds(Path(name))
    return model_folder(name, revision)


def refuse_other_kinds(path: Path) -> None:
    """Say what a path holds that is no folder of a model in safetensors, if that is known.

    Raises:
        CheckpointError: it is another runtime's format, pickled weights, or a file.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        kind = OTHERS.get(file.suffix.lower())
        if kind == "GGUF":
            raise CheckpointError(
                f"{path}: found a GGUF file ({file.name}) where a folder is needed. Commands take "
                f"the file itself; a folder of it is made by `ptq convert {file} FOLDER --to "
                "compressed_tensors`"
            )
        if kind is not None:
            raise CheckpointError(
                f"{path}: found {kind} ({file.name}), another runtime's format, which is not read "
                "here. Give the folder of the original model: config.json, tokenizer.json and "
                "weights in safetensors"
            )
    pickles = [file.name for file in files if file.suffix.lower() in PICKLES]
    if pickles:
        raise CheckpointError(
            f"{path}: found only pickled weights ({', '.join(pickles[:3])}), which can run any "
            "code when they are read and are refused. Save the model with "
            "save_pretrained(..., safe_serialization=True) where you trust it"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path}: found a file; give the folder of the model it belongs to")
