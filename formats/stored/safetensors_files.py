"""The safetensors files of a checkpoint folder: their headers checked, their tensors read lazily.

Format: https://github.com/huggingface/safetensors, "Format": 8 bytes of little-endian header
length, a JSON header of `{name: {dtype, shape, data_offsets}}`, then the data without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from formats.errors import CheckpointError
from formats.files import safe_join

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class TensorFile(Protocol):
    """Where tensors are read from: a file, or a parameter of one that holds many layers."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    @property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each tensor."""
        ...

    def span(self, name: str) -> tuple[int, int]:
        """Where a tensor begins and ends in the file, in bytes."""
        ...


@runtime_checkable
class Derived(Protocol):
    """A `TensorFile` whose tensors follow from a file's, and lie in none."""

    def held(self, name: str) -> bytes:
        """A tensor's elements."""
        ...


class SafetensorsFile:
    """One file: names, shapes and types from its header, tensors on request.

    Raises:
        CheckpointError: the header is damaged, or the data are shorter or longer than it says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors, self.metadata, self._spans = _read_header(path)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        return read_elements({name: self}, [name]).reshape(self.tensors[name][1])

    def span(self, name: str) -> tuple[int, int]:
        """Where a tensor begins and ends in the file, in bytes."""
        return self._spans[name]


def read_elements(files: Mapping[str, TensorFile], names: Sequence[str]) -> Tensor:
    """Read tensors into one of one dimension, the elements of each behind those before it.

    They are read and not mapped: pages of a mapped file stay in memory as long as it is open, so
    that going through a model block by block would take as much as the whole of it.

    Args:
        files: Where each is.
        names: Which; those of several types become one that holds all, as by `torch.cat`.

    Raises:
        CheckpointError: a file has become shorter.
    """
    kinds = [files[name].tensors[name] for name in names]
    dtypes = {dtype for dtype, _ in kinds}
    if len(dtypes) > 1:
        return torch.cat([read_elements(files, [name]) for name in names])
    out = torch.empty(sum(math.prod(shape) for _, shape in kinds), dtype=dtypes.pop())
    data, start = out.view(torch.uint8).numpy().data, 0
    for path, run in groupby(names, lambda name: files[name].path):
        with path.open("rb") as file:
            for name in run:
                source = files[name]
                first, end = source.span(name)
                stop = start + end - first
                if isinstance(source, Derived):
                    data[start:stop] = source.held(name)
                    start = stop
                    continue
                file.seek(first)
                if file.readinto(data[start:stop]) != stop - start:
                    raise _damaged(path, f"{name} ends early")
                start = stop
    return out


def read_tensors(files: Mapping[str, TensorFile], names: Sequence[str]) -> list[Tensor]:
    """Read tensors of one type; each file is opened once for neighbours in it."""
    shapes = [files[name].tensors[name][1] for name in names]
    parts = read_elements(files, names).split([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _read_header(
    path: Path,
) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], dict, dict[str, tuple[int, int]]]:
    """Type and shape of each tensor, the metadata, and where in the file each tensor lies."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise _damaged(path, f"a header of {length} bytes does not fit into {size} bytes")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            tensors = {
                name: (DTYPES[row["dtype"]], tuple(row["shape"]), tuple(row["data_offsets"]))
                for name, row in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(path, f"its header cannot be read ({error!r})") from error
    position = 0
    for name, (dtype, shape, offsets) in sorted(tensors.items(), key=lambda row: row[1][2]):
        end = position + math.prod(shape) * dtype.itemsize
        if offsets != (position, end):
            raise _damaged(path, f"{name} has offsets {offsets}, not ({position}, {end})")
        position = end
    if position != size - 8 - length:
        raise _damaged(path, f"its data are {size - 8 - length} bytes, the header says {position}")
    start = 8 + length
    spans = {name: (start + row[2][0], start + row[2][1]) for name, row in tensors.items()}
    return {name: row[:2] for name, row in tensors.items()}, metadata, spans


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name}: not a whole safetensors file: {reason}. Copy or download it again, or write "
        "the checkpoint again"
    )


def open_weights(folder: Path) -> dict[str, SafetensorsFile]:
    """The file of every tensor of a checkpoint folder, by the tensor's name.

    Raises:
        CheckpointError: there are no safetensors files, only pickled ones, the index and the files
            disagree, or a tensor has a type that nothing here multiplies.
    """
    files = _open_files(folder)
    for name, file in files.items():
        if file.tensors[name][0] == torch.float8_e5m2:
            raise CheckpointError(
                f"{file.path.name}: {name} is float8_e5m2, which is not run: the fp8 kernels here "
                "take float8_e4m3fn. Get the model in bf16, or in fp8 e4m3, and quantize that with "
                "an fp8 recipe"
            )
    return files


def _open_files(folder: Path) -> dict[str, SafetensorsFile]:
    if (folder / INDEX).is_file():
        return _open_indexed(folder)
    if (folder / SINGLE).is_file():
        strays = {path.name for path in folder.glob("*.safetensors")} - {SINGLE}
        if strays:
            raise CheckpointError(
                f"{folder}: found {', '.join(sorted(strays))} beside {SINGLE} without an index. "
                f"Remove what does not belong to the model, or add {INDEX}"
            )
        file = SafetensorsFile(folder / SINGLE)
        return dict.fromkeys(file.tensors, file)
    pickles = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth") for p in folder.glob(kind))
    if pickles:
        raise CheckpointError(
            f"{folder}: found only pickled weights ({', '.join(pickles[:3])}), which can run any "
            "code when they are read and are refused. Save the model with "
            "save_pretrained(..., safe_serialization=True) where you trust it"
        )
    raise CheckpointError(f"{folder}: found neither {SINGLE} nor {INDEX}; is this a model folder?")


def _open_indexed(folder: Path) -> dict[str, SafetensorsFile]:
    try:
        weight_map = json.loads((folder / INDEX).read_bytes())["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{INDEX}: cannot be read ({error!r}); get it again") from error
    files: dict[str, SafetensorsFile] = {}
    for shard in shards:
        path = safe_join(folder, shard, INDEX)
        if not path.is_file():
            raise CheckpointError(
                f"{folder}: {shard} is missing; {INDEX} names it. Get the checkpoint again"
            )
        files[shard] = SafetensorsFile(path)
    held = {name: shard for shard, file in files.items() for name in file.tensors}
    if held != weight_map:
        wrong = sorted(n for n in held.keys() | weight_map if held.get(n) != weight_map.get(n))
        name = wrong[0]
        raise CheckpointError(
            f"{INDEX} and the shards disagree on {len(wrong)} tensors; {name} is listed in "
            f"{weight_map.get(name)} and held by {held.get(name)}. Get the checkpoint again"
        )
    return {name: files[shard] for name, shard in held.items()}
