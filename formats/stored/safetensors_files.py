"""The safetensors files of a checkpoint folder: their headers checked, their tensors read lazily.

Format: https://github.com/huggingface/safetensors, "Format": 8 bytes of little-endian header
length, a JSON header of `{name: {dtype, shape, data_offsets}}`, then the data without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from formats.documents import Strict, Values, parse, read_document
from formats.errors import CheckpointError
from formats.files import find_file, fsync_path
from formats.hub import refuse_other_kinds

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Of data in a file.
_ORDER = "I64 F64 F32 I32 BF16 F16 I16 F8_E8M0 F8_E4M3 F8_E5M2 I8 U8 BOOL".split()
_PLACE = {DTYPES[name]: place for place, name in enumerate(_ORDER)}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "Copy or download it again, or write the checkpoint again"
Size = Annotated[int, Field(ge=0, lt=2**63)]


class HeaderRow(Strict):
    """What a file's header says of a tensor; offsets are those of its first byte and its end."""

    dtype: Literal[tuple(DTYPES)]  # pyright: ignore[reportInvalidTypeForm]
    shape: list[Size]
    data_offsets: Annotated[list[Size], Field(min_length=2, max_length=2)]


class Header(BaseModel):
    """A file's header: a row for each tensor, and texts of whoever wrote it."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    __pydantic_extra__: dict[str, HeaderRow]
    metadata: dict[str, str] = Field(default={}, alias="__metadata__")

    @property
    def rows(self) -> dict[str, HeaderRow]:
        """The tensors, by their names."""
        return self.__pydantic_extra__


class Index(Values):
    """Which file holds each tensor; what else an index says is not read."""

    weight_map: dict[str, str]


Kind = tuple[torch.dtype, tuple[int, ...]]  # type and shape of a tensor


class _NamedKinds(Protocol):
    @property
    def path(self) -> Path:
        """The file that tensors are in, or follow from."""
        ...

    @property
    def tensors(self) -> Mapping[str, Kind]:
        """Type and shape of each tensor."""
        ...


class StoredTensors(_NamedKinds, Protocol):
    """Where tensors are read from: a file, or a parameter of one that holds many layers."""

    def span(self, name: str) -> tuple[int, int]:
        """Where a tensor begins and ends in the file, in bytes."""
        ...


@runtime_checkable
class Derived(_NamedKinds, Protocol):
    """Tensors that follow from a file's, and are in none."""

    def held(self, name: str) -> Tensor:
        """A tensor."""
        ...


class Computed:
    """One tensor that follows from a file's, made when it is asked for; a `Derived`."""

    def __init__(self, path: Path, name: str, kind: Kind, make: Callable[[], Tensor]) -> None:
        self.path, self.tensors, self._make = path, {name: kind}, make

    def held(self, name: str) -> Tensor:
        """The tensor."""
        return self._make()


TensorFile = StoredTensors | Derived


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
        return read_tensor(self, name)

    def span(self, name: str) -> tuple[int, int]:
        """Where a tensor begins and ends in the file, in bytes."""
        return self._spans[name]


class RowsOf:
    """Layers that are runs of rows of one tensor.

    Args:
        starts: First row of each layer, of the tensor seen as [rows, columns], by the name that
            its own tensor gets.
        shape: Of each layer's own tensor.
    """

    def __init__(
        self, file: StoredTensors, tensor: str, starts: Mapping[str, int], shape: tuple[int, ...]
    ) -> None:
        dtype = file.tensors[tensor][0]
        width = dtype.itemsize * (shape[-1] if len(shape) > 1 else 1)
        self._file, self._tensor, self._starts = file, tensor, starts
        self._width, self._nbytes = width, dtype.itemsize * math.prod(shape)
        self.path = file.path
        self.tensors = dict.fromkeys(starts, (dtype, shape))

    def span(self, name: str) -> tuple[int, int]:
        """Where a layer's rows begin and end in the file, in bytes."""
        start = self._file.span(self._tensor)[0] + self._starts[name] * self._width
        return start, start + self._nbytes


def read_elements(files: Mapping[str, TensorFile], names: Sequence[str]) -> Tensor:
    """Read tensors into one of one dimension, the elements of each after those before it.

    They are read and not mapped: pages of a mapped file stay in memory as long as it is open, so
    that going through a model block by block would take as much as the whole of it.

    Args:
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
                if isinstance(source, Derived):
                    own = source.held(name).contiguous().view(-1).view(torch.uint8)
                    data[start : start + len(own)] = own.numpy().data
                    start += len(own)
                    continue
                first, end = source.span(name)
                stop = start + end - first
                file.seek(first)
                if file.readinto(data[start:stop]) != stop - start:
                    raise _damaged(path, f"{name} ends early")
                start = stop
    return out


def read_tensor(file: TensorFile, name: str) -> Tensor:
    """Read one tensor of a file."""
    return read_elements({name: file}, [name]).reshape(file.tensors[name][1])


def read_tensors(files: Mapping[str, TensorFile], names: Sequence[str]) -> list[Tensor]:
    """Read tensors of one type; each file is opened once for neighbours in it."""
    shapes = [files[name].tensors[name][1] for name in names]
    parts = read_elements(files, names).split([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _read_header(path: Path) -> tuple[dict[str, Kind], dict, dict[str, tuple[int, int]]]:
    """Type and shape of each tensor, the metadata, and where in the file each tensor is."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(8)
        if begin == b"version ":
            raise _damaged(path, "it is Git LFS's pointer to one, which `git lfs pull` replaces")
        length = int.from_bytes(begin, "little")
        if size < 8 or length > size - 8:
            raise _damaged(path, f"a header of {length} bytes does not fit into {size} bytes")
        header = file.read(length)
    place = f"{path}: not a whole safetensors file: its header"
    parsed = parse(header, Header, place, AGAIN)
    rows = parsed.rows
    tensors = {name: (DTYPES[row.dtype], tuple(row.shape)) for name, row in rows.items()}
    position, start = 0, 8 + length
    spans: dict[str, tuple[int, int]] = {}
    for name, row in sorted(rows.items(), key=lambda item: item[1].data_offsets):
        dtype, shape = tensors[name]
        end = position + math.prod(shape) * dtype.itemsize
        if row.data_offsets != [position, end]:
            raise _damaged(path, f"{name} has offsets {row.data_offsets}, not [{position}, {end}]")
        spans[name] = (start + position, start + end)
        position = end
    if position != size - start:
        raise _damaged(path, f"its data are {size - start} bytes, the header says {position}")
    return tensors, parsed.metadata, spans


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: not a whole safetensors file: {reason}. {AGAIN}")


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
    index = read_document(folder, INDEX, Index, "Get it again")
    if index is not None:
        return _open_indexed(folder, index.weight_map)
    single = find_file(folder, SINGLE)
    strays = sorted({path.name for path in folder.glob("*.safetensors")} - {SINGLE})
    if single is None:
        refuse_other_kinds(folder)
        more = f"{strays[0]} needs its index, or that name" if strays else "is this a model folder?"
        raise CheckpointError(f"{folder}: found neither {SINGLE} nor {INDEX}; {more}")
    if strays:
        raise CheckpointError(
            f"{folder}: found {', '.join(strays)} beside {SINGLE} without an index. "
            f"Remove what does not belong to the model, or add {INDEX}"
        )
    file = SafetensorsFile(single)
    return dict.fromkeys(file.tensors, file)


def _open_indexed(folder: Path, weight_map: Mapping[str, str]) -> dict[str, SafetensorsFile]:
    files: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weight_map.values())):
        path = find_file(folder, shard, INDEX)
        if path is None:
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


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: dict[str, str] | None = None,
    digest: Callable[[bytes | memoryview], object] = lambda data: None,
) -> None:
    """Write a safetensors file and flush it.

    Its bytes are those of the library, which would hold all of them once more while it writes, and
    make files that nobody but their owner may read.

    Args:
        digest: Called with all that is to be written, piece by piece. SHA-256 takes longer than a
            fast disk.
    """
    names = sorted(tensors, key=lambda name: (_PLACE[tensors[name].dtype], name.encode()))
    with path.open("xb") as file:
        for data in _pieces({name: tensors[name] for name in names}, metadata):
            file.write(data)
            digest(data)
    fsync_path(path)


def _pieces(
    tensors: Mapping[str, Tensor], metadata: dict[str, str] | None
) -> Iterator[bytes | memoryview]:
    """A file's header, then the data of each tensor."""
    yield _header(tensors, metadata)
    for tensor in tensors.values():
        flat = tensor.detach().contiguous().view(-1)
        yield flat.view(torch.uint8).cpu().numpy().data


def _header(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> bytes:
    """A file's header with its length, for tensors in the order of their data."""
    rows: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        rows[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class NamedTensors:
    """The tensors of a folder by name, each read from its file when it is asked for."""

    path: Path
    _files: Mapping[str, TensorFile]

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._files))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from its file's header."""
        return self._kind(name)[1]

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a tensor, from its file's header."""
        return self._kind(name)[0]

    def tensor(self, name: str) -> Tensor:
        """Read one tensor from its file."""
        return read_tensor(self._file(name), name)

    def tensors(self, names: Sequence[str]) -> Tensor:
        """Read tensors that differ in their first size at most as one, as `torch.cat` gives it."""
        width = self.shape(names[0])[1:]
        return read_elements({name: self._file(name) for name in names}, names).reshape(-1, *width)

    def modules_stored_in(self, dtypes: Collection[torch.dtype]) -> tuple[str, ...]:
        """Full names of the layers whose weight is packed or of one of some types, sorted."""
        weights = (
            name
            for name, file in self._files.items()
            if name.endswith(".weight_packed")
            or (name.endswith(".weight") and file.tensors[name][0] in dtypes)
        )
        return tuple(sorted(name.rpartition(".")[0] for name in weights))

    def _kind(self, name: str) -> Kind:
        return self._file(name).tensors[name]

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            raise CheckpointError(f"{name} is missing from {self.path}")
        return self._files[name]
