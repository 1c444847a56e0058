"""A part of a checkpoint: some rows and columns of its layers, read without the others.

What belongs to a layer is cut with its weight: scales, zero points and a bias by the outputs they
are for, scales and zero points also by the groups of inputs. One scale for all of a tensor, of the
weight or of the input, is every part's. Rows lie next to each other in a file, and are read as they
are; of columns each row's piece is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.foreign.folder import ForeignLayer
from formats.scheme import WeightSpec
from formats.stored.safetensors_files import Computed, Derived, RowsOf, StoredTensors, TensorFile
from formats.stored.weights import StoredWeight

ALL = 0  # one entry of a tensor for all outputs, or all inputs


@dataclass(frozen=True)
class Span:
    """A run of outputs or inputs, or of what else is counted: [first, end)."""

    first: int
    end: int

    @property
    def count(self) -> int:
        """How many there are."""
        return self.end - self.first

    @property
    def slice(self) -> slice:
        """What takes them out of all."""
        return slice(self.first, self.end)


@dataclass(frozen=True)
class Cut:
    """What is taken of a layer, or of a tensor of one dimension.

    Attributes:
        rows: Outputs; None for all.
        columns: Inputs; None for all.
    """

    rows: Span | None = None
    columns: Span | None = None


@runtime_checkable
class Cuttable(Protocol):
    """A checkpoint that makes parts of itself otherwise than by reading them from files."""

    def part(self, cuts: Mapping[str, Cut], vectors: Mapping[str, Span]) -> Checkpoint:
        """See `CheckpointPart`."""
        ...


def checkpoint_part(
    whole: Checkpoint, cuts: Mapping[str, Cut], vectors: Mapping[str, Span]
) -> Checkpoint:
    """Some outputs and inputs of a checkpoint's layers; arguments, errors: of `CheckpointPart`."""
    if isinstance(whole, Cuttable):
        return whole.part(cuts, vectors)
    return CheckpointPart(whole, cuts, vectors)


class CheckpointPart(Checkpoint):
    """Some outputs and inputs of a checkpoint's layers, as a checkpoint with smaller layers.

    Args:
        cuts: What is taken of layers, by full name; others are taken whole.
        vectors: Entries that are taken of tensors of one dimension, by full name.

    Raises:
        CheckpointError: outputs or inputs that share a scale, or a word, would be cut apart.
    """

    def __init__(
        self, whole: Checkpoint, cuts: Mapping[str, Cut], vectors: Mapping[str, Span]
    ) -> None:
        vars(self).update(vars(whole))
        vars(self).pop("_packed_shapes", None)  # those of whole layers
        self._files = {
            name: self._part(whole, name, file, cuts, vectors)
            for name, file in whole._files.items()
        }
        self._foreign = {
            module: _ForeignPart(layer, cuts[module], _spec(whole, module))
            if module in cuts
            else layer
            for module, layer in whole._foreign.items()
        }

    @staticmethod
    def _part(
        whole: Checkpoint,
        name: str,
        file: TensorFile,
        cuts: Mapping[str, Cut],
        vectors: Mapping[str, Span],
    ) -> TensorFile:
        module, _, leaf = name.rpartition(".")
        if name in vectors:
            return tensor_part(name, file, vectors[name], None)
        if module not in cuts or leaf == "input_scale":
            return file
        cut = cuts[module]
        if leaf == "weight_shape":
            own = cut_shape(whole.weight_shape(module), cut)
            return Computed(file.path, name, (torch.int64, (2,)), partial(torch.tensor, own))
        units = entry_units(leaf, whole.scheme_of(module).weights)
        shape = file.tensors[name][1]
        spans = [
            entries(name, span, unit, size)
            for span, unit, size in zip((cut.rows, cut.columns), units, shape, strict=False)
        ]
        rows, columns = (*spans, None, None)[:2]
        return tensor_part(name, file, rows, columns)


def entry_units(leaf: str, spec: WeightSpec | None) -> tuple[int, int]:
    """Outputs and inputs of a layer that an entry of one of its tensors is for; `ALL` for all.

    Args:
        leaf: Last part of the tensor's name.
        spec: How the weight is quantized; None where it is not.
    """
    if leaf in ("weight", "bias") or spec is None:
        return 1, 1
    word, block = 32 // spec.bits, [max(length, ALL) for length in spec.block]
    if leaf == "weight_packed":
        return 1, 2 if spec.dtype == "fp4_e2m1" else word
    if leaf == "weight_zero_point":
        return (block[0] if spec.float_zeros else word), block[1]
    return (block[0], block[1]) if leaf == "weight_scale" else (ALL, ALL)


def entries(name: str, span: Span | None, unit: int, size: int) -> Span | None:
    """The entries of a tensor for a run of outputs or inputs; None for all of them.

    Args:
        span: The run; None for all.
        unit: How many an entry is for; `ALL` for all.
        size: Entries of the tensor.

    Raises:
        CheckpointError: an entry is for some of the run and for others.
    """
    if span is None or unit == ALL:
        return None
    end = -(-span.end // unit)
    if span.first % unit or (span.end % unit and end < size):
        raise CheckpointError(
            f"{name} has an entry for every {unit} outputs or inputs of its layer, and a part of "
            f"the layer would be {span.first} to {span.end}. Cut it in fewer parts"
        )
    return Span(span.first // unit, end)


def tensor_part(name: str, file: TensorFile, rows: Span | None, columns: Span | None) -> TensorFile:
    """Some rows and columns of a tensor of one or two dimensions, under its own name."""
    dtype, shape = file.tensors[name]
    if (rows is None and columns is None) or not shape:
        return file
    rows = rows or Span(0, shape[0])
    if columns is None and not isinstance(file, Derived):
        return RowsOf(file, name, {name: rows.first}, (rows.count, *shape[1:]))
    size = (rows.count, *(shape[1:] if columns is None else (columns.count,)))
    return Computed(file.path, name, (dtype, size), partial(_read_part, name, file, rows, columns))


def _read_part(name: str, file: TensorFile, rows: Span, columns: Span | None) -> Tensor:
    """Some rows, and perhaps columns, of a tensor, which lie together in no file."""
    if isinstance(file, Derived):
        own = file.held(name).reshape(file.tensors[name][1])[rows.slice]
        return own if columns is None else own[:, columns.slice].contiguous()
    assert columns is not None
    return _read_columns(file, name, rows, columns)


def _read_columns(file: StoredTensors, name: str, rows: Span, columns: Span) -> Tensor:
    """A rectangle of a matrix in a file; no more of it is read than whole pages."""
    dtype, (_, width) = file.tensors[name]
    stride, (first, _) = width * dtype.itemsize, file.span(name)
    shape = (rows.count, stride)
    mapped = np.memmap(file.path, np.uint8, "r", first + rows.first * stride, shape)
    own = mapped[:, columns.first * dtype.itemsize : columns.end * dtype.itemsize]
    return torch.from_numpy(np.array(own)).view(dtype)


def cut_shape(shape: tuple[int, ...], cut: Cut) -> tuple[int, ...]:
    """Outputs and inputs of a part of a layer."""
    spans = (cut.rows, cut.columns)
    return tuple(
        size if span is None else span.count for size, span in zip(shape, spans, strict=True)
    )


class _ForeignPart(ForeignLayer):
    """A part of a layer in a layout of other software, which is unpacked whole, and then cut."""

    def __init__(self, layer: ForeignLayer, cut: Cut, spec: WeightSpec) -> None:
        vars(self).update(vars(layer))
        self._layer, self._cut_out, self._spec = layer, cut, spec

    def weight(self, device: torch.device | str = "cpu") -> StoredWeight:
        """Read and unpack it.

        Raises:
            CheckpointError: as of the whole layer, or inputs that lie in another order
                (act-order), or share a scale, would be cut apart.
        """
        whole, cut = self._layer.weight(device), self._cut_out
        if cut.columns is not None and whole.order is not None:
            raise CheckpointError(
                f"{self._name}: its groups are no neighbouring inputs (g_idx, act-order), and a "
                "run of inputs cannot be cut out of it"
            )
        units = entry_units("weight_scale", self._spec)
        rows, columns = (
            entries(f"{self._name}.weight_scale", span, unit, size)
            for span, unit, size in zip(
                (cut.rows, cut.columns), units, whole.scale.shape, strict=True
            )
        )
        return replace(
            whole,
            q=_rectangle(whole.q, cut.rows, cut.columns),
            scale=_rectangle(whole.scale, rows, columns),
            zero_point=None
            if whole.zero_point is None
            else _rectangle(whole.zero_point, rows, columns),
        )


def _rectangle(matrix: Tensor, rows: Span | None, columns: Span | None) -> Tensor:
    """Some rows and columns of a matrix, by themselves in memory."""
    matrix = matrix if rows is None else matrix[rows.slice]
    matrix = matrix if columns is None else matrix[:, columns.slice]
    return matrix.contiguous().clone()


def _spec(checkpoint: Checkpoint, module: str) -> WeightSpec:
    spec = checkpoint.scheme_of(module).weights
    assert spec is not None
    return spec
