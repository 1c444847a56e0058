"""A .gguf file: its metadata, and its tensors in memory that is mapped.

Format: the specification of ggml, version 3 (2 differs in nothing that is read here). The package
`gguf` of llama.cpp parses it; what it takes for granted of a file is checked here, and refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.errors import CheckpointError
from formats.namespace import later

if TYPE_CHECKING:
    import numpy as np
with later():
    import gguf

MAGIC = b"GGUF"
AGAIN = "get the file again"
MOST = 2**31


@dataclass(frozen=True)
class Stored:
    """A tensor of a file.

    Attributes:
        kind: Its type, as ggml names it: `F32`, `F16`, `BF16`, `Q8_0`, `Q4_K`, ...
        shape: Its shape, rows before columns.
        data: Its numbers [*shape], or of blocks their bytes, uint8 [*shape[:-1], bytes of a row].
    """

    kind: str
    shape: tuple[int, ...]
    data: np.ndarray


class GgufFile:
    """An open .gguf file.

    Args:
        path: The file.

    Attributes:
        path: The file.
        metadata: Its values by key.
        architecture: Of the model, as llama.cpp names it.
        tensors: By their name there.

    Raises:
        CheckpointError: it is no such file, is damaged, split or in the other byte order, holds
            types that are not known, or the package `gguf` is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, self.tensors = _read(path)
        parts = self.metadata.get("split.count", 1)
        if parts > 1:
            raise CheckpointError(
                f"{path}: found one of {parts} parts of a model. Join them first: "
                f"llama-gguf-split --merge {path.name} WHOLE.gguf, with the first part's name"
            )
        self.architecture: str = ""
        self.architecture = self.value("general.architecture", str)

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of the metadata; `{arch}` in the key stands for the architecture.

        Raises:
            CheckpointError: it is missing and has no default, or is of another type.
        """
        full = key.format(arch=self.architecture) if "{arch}" in key else key
        found = self.metadata.get(full, default)
        if kind is float and type(found) is int:
            found = float(found)
        if not isinstance(found, kind) or (kind is not bool and isinstance(found, bool)):
            raise self._unfit(full, found, kind.__name__)
        return found

    def count(self, key: str, default: int | None = None) -> int:
        """A size: an integer from 1 to 2^31; see `value`.

        Raises:
            CheckpointError: it is none.
        """
        found = self.value(key, int, default)
        if not 0 < found <= MOST:
            raise self._unfit(key, found, f"an integer from 1 to {MOST}")
        return found

    def array(self, key: str, kind: type, size: int | None = None, default: Any = None) -> list:
        """A list of values of one type; see `value`.

        Args:
            key: Its key.
            kind: Type of each value.
            size: How many there must be; None for any number.
            default: What stands for a list that is missing.

        Raises:
            CheckpointError: it is missing and has no default, has another size or other types.
        """
        found = self.value(key, list, default)
        if set(map(type, found)) - {kind} or size not in (None, len(found)):
            many = "any number" if size is None else str(size)
            raise self._unfit(key, f"a list of {len(found)}", f"{many} of {kind.__name__}")
        return found

    def _unfit(self, key: str, found: Any, needed: str) -> CheckpointError:
        shown = found if isinstance(found, str) and found.startswith("a list") else repr(found)
        state = "is missing" if found is None else f"is {shown}"
        return CheckpointError(
            f"{self.path}: {key} {state}; needed is {needed}. {AGAIN.capitalize()}"
        )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    with path.open("rb") as file:
        head = file.read(8)
    if head[:4] != MAGIC:
        raise CheckpointError(f"{path}: it does not begin as a GGUF file does; {AGAIN}")
    version = int.from_bytes(head[4:], "little")
    if version >= 1 << 16:
        raise CheckpointError(
            f"{path}: found big-endian numbers, which are not read here. Convert it with "
            "gguf-convert-endian, of the package gguf, or get the little-endian file"
        )
    try:
        reader_of = gguf.GGUFReader
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{path}: the package gguf reads it, which is not installed: pip install 'ptq[gguf]'"
        ) from error
    try:
        reader = reader_of(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {
            tensor.name: Stored(
                tensor.tensor_type.name, tuple(int(n) for n in tensor.shape[::-1]), tensor.data
            )
            for tensor in reader.tensors
        }
    except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: it is damaged, or holds what the installed package gguf does not know "
            f"({' '.join(str(error).split())}); {AGAIN}, or update gguf"
        ) from error
    return metadata, tensors
