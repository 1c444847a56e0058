"""Linear layers on a GPU: packed for their kernels, and run by them.

What is said of layers while they are loaded is said in one line where it holds for many.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from inference.models.read import StoredLinear
from kernels.triton.common import Workspace
from kernels.triton.fused import quantize_rows
from kernels.triton.linear.dispatch import FP8, pack
from kernels.triton.linear.packing import BLOCK
from kernels.triton.linear.w16a16 import DenseWeight
from kernels.triton.linear.weight import GpuWeight, InputFormat, fits_short

TILE = 64  # outputs of a tile; of blocks of fp8 `BLOCK`
AT_ONCE = 256  # rows whose split sums a workspace holds
ALIGNED = 16  # bytes that the tensor memory accelerator wants rows to begin at

_workspaces: WeakValueDictionary[tuple[torch.device, int], Workspace] = WeakValueDictionary()


def workspace_on(device: torch.device) -> Workspace:
    """The workspace of split sums of the current stream of a device.

    It lives as long as it is referenced: who runs many layers does, so that they share it.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _workspaces.get((device, stream))
    if found is None:
        found = _workspaces[device, stream] = Workspace.on(device)
    return found


def rows_of(stored: StoredLinear, dtype: torch.dtype) -> InputFormat:
    """How a layer wants its input; `dtype` is the model's float type."""
    activations = stored.scheme.activations
    if activations is None:
        return InputFormat(dtype)
    kind = torch.int8 if activations.dtype == "int8" else FP8
    scale, both = stored.input_scale, None
    if scale is not None and stored.sink_scale is not None and (stored.sink_scale > scale).any():
        # Others fit the range of all tokens, and attention that ends in o's input knows one scale.
        both = torch.stack((scale, stored.sink_scale), dim=-1)  # of a stack [E, 2]
    group = None if activations.group == -1 else activations.group
    return InputFormat(kind, scale, group, both=both)


def as_wanted(
    x: Tensor, own: InputFormat, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Float rows [T, K] as a layer wants them, and their scales.

    Args:
        x: In the model's float type.
        own: How the layer wants them.
        sinks: bool or int32 [T], which rows are of sink tokens; None where none is.
    """
    if own.dtype == x.dtype and own.length is None:
        x = x.contiguous()  # one row is, out of longer ones, wherever it begins
        return (x.clone() if x.data_ptr() % ALIGNED else x), None
    scale, by = own.scales_of(None if sinks is None else sinks.to(torch.int32))
    return quantize_rows(x.contiguous(), scale, own.dtype, own.group, by, own.length)


@dataclass(frozen=True)
class GpuLinear:
    """A linear layer on a GPU, quantized or not.

    Attributes:
        weight: Packed for its kernel.
        rows: How its input is given to `run`.
        order: int64 [K], the input that each column of the weight multiplies, of a stack [E, K];
            None where column k multiplies input k.
        outputs: How many there are, where the weight has rows of filling after them; else None.
        missing: Columns of zeros that the weight has after its inputs. Rows come without zeros for
            them where the kernel takes short rows, else whoever quantizes them stores these
            (`InputFormat.length`).
        invariant: Whether a row's result has the same bits whatever other rows there are.
    """

    weight: GpuWeight
    rows: InputFormat
    order: Tensor | None = None
    outputs: int | None = None
    missing: int = 0
    invariant: bool = False

    def __call__(
        self, x: Tensor, sinks: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """[T, K] float -> [T, N] in `dtype`, by default the type of `x`; `sinks` as `as_wanted`."""
        return self.run(*as_wanted(x, self.rows, sinks), dtype or x.dtype)

    def run(self, rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The layer on rows that are as it wants them, or without what fills them up: [T, N] in
        `dtype`."""
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        if self.missing and not self._takes(rows.shape[1]):
            rows = _wider(rows, self.missing)
        run = self._run_alike if self.invariant and not self.weight.exact else self.weight.run
        y = run(rows, scales, workspace_on(rows.device), dtype)
        return y if self.outputs is None else y[:, : self.outputs].contiguous()

    def _takes(self, inputs: int) -> bool:
        """Whether the kernel reads rows of so many inputs as they are."""
        long = self.weight.size[1]
        return inputs == long or (self.weight.SHORT_ROWS and fits_short(inputs, long))

    def _run_alike(
        self, rows: Tensor, scales: Tensor | None, workspace: Workspace, dtype: torch.dtype
    ) -> Tensor:
        """`GpuWeight.run` with sums in one order; as many rows at a time as the workspace holds."""
        weight, parts = self.weight, list[Tensor]()
        for i in range(0, max(len(rows), 1), AT_ONCE):
            x, own = rows[i : i + AT_ONCE], scales
            if own is not None and own.numel() > 1:
                own = own[i : i + AT_ONCE]
            parts.append(weight.run(x, own, workspace, dtype, tile=weight.invariant_tile(x)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def gathers(self) -> bool:
        """Whether `gather` gives rows of the weight as it is."""
        return self.weight.gathers and self.order is None

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight as floats: [T, K] in `dtype` of ids int64 [T]."""
        found = self.weight.rows(ids, dtype)
        return found[:, : found.shape[1] - self.missing].contiguous() if self.missing else found

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.weight.nbytes

    @property
    def matrix(self) -> Tensor | None:
        """The weight [N, K], where it is not quantized."""
        return self.weight.weight if isinstance(self.weight, DenseWeight) else None


def pack_linear(stored: StoredLinear, dtype: torch.dtype) -> GpuLinear:
    """Lay a layer, or a stack of them, out for the kernel that takes it.

    What none takes is dequantized, which is logged.

    Args:
        stored: On the GPU.
        dtype: The model's float type.
    """
    weights, bias = stored.scheme.weights, stored.bias
    if weights is None or stored.scale is None:
        held = DenseWeight(stored.weight.to(dtype), None if bias is None else bias.to(dtype))
        return GpuLinear(held, InputFormat(dtype))
    inputs = rows_of(stored, dtype)
    filled, missing = _filled(stored, inputs)
    assert filled.scale is not None
    own = pack(
        filled.weight,
        filled.scale,
        filled.zero_point,
        filled.bias,
        inputs,
        dtype,
        bits=weights.bits,
        group=filled.group,
        unit=filled.unit,
    )
    if isinstance(own, DenseWeight) and filled is not stored:  # filling is for kernels
        filled, missing = stored, 0
        rows, columns = stored.weight.shape[-2:]
        own = DenseWeight(
            own.weight[..., :rows, :columns].contiguous(), None if bias is None else bias.to(dtype)
        )
    if isinstance(own, DenseWeight):
        why = "no GPU kernel takes {} of {}; {} dequantized, with the same numbers"
        warn_of(stored.names, why, stored.scheme.text, tuple(stored.weight.shape[-2:]))
    outputs = stored.weight.shape[-2]
    short = None if filled.weight.shape[-2] == outputs else outputs
    long = filled.weight.shape[-1]
    short_rows = own.SHORT_ROWS and fits_short(long - missing, long)
    if missing and stored.order is None and not short_rows:
        inputs = replace(inputs, length=long)
    return GpuLinear(own, inputs, stored.order, short, missing)


def _filled(stored: StoredLinear, inputs: InputFormat) -> tuple[StoredLinear, int]:
    """A quantized layer, or a stack of them, with as many rows and columns more as fill tiles.

    Returns:
        (the layer, how many columns it has more): rows repeat the last one; rows of inputs have
        zeros for the columns.
    """
    assert stored.scheme.weights is not None
    assert stored.scale is not None
    outputs, columns = stored.weight.shape[-2:]
    longer, wider = -outputs % (BLOCK if inputs.group else TILE), -columns % BLOCK
    group = stored.group or columns
    if stored.scheme.weights.dtype[:3] == "fp4" or (stored.group and (columns + wider) % group):
        wider = 0  # fp4 has its own filling; groups that do not end with tiles have no kernel
    if not longer and not wider:
        return stored, 0
    weight, scale, zero_point = stored.weight, stored.scale, stored.zero_point
    if wider:
        weight = _wider(weight, wider)
        more = 0 if stored.group is None else (columns + wider) // group - scale.shape[-1]
        scale, zero_point = (_repeated(t, more, -1) for t in (scale, zero_point))
    parts = (weight, scale, zero_point, stored.unit)
    weight, scale, zero_point, unit = (_repeated(t, longer, -2) for t in parts)
    bias = _repeated(stored.bias, longer, -1)
    assert weight is not None
    made = replace(stored, weight=weight, scale=scale, zero_point=zero_point, bias=bias, unit=unit)
    return made, wider


def _repeated(tensor: Tensor | None, times: int, dim: int) -> Tensor | None:
    """A tensor of any type with its last row, or column, some times more."""
    if tensor is None or not times:
        return tensor
    own = tensor.view(torch.int8) if tensor.dtype == FP8 else tensor
    last = own.narrow(dim, own.shape[dim] - 1, 1).repeat_interleave(times, dim)
    return torch.cat([own, last], dim).view(tensor.dtype)


def _wider(rows: Tensor, columns: int) -> Tensor:
    """Rows of any type with some columns of zeros after them."""
    own = rows.view(torch.int8) if rows.dtype == FP8 else rows
    return torch.nn.functional.pad(own, (0, columns)).view(rows.dtype)


log = logging.getLogger("ptq.inference")


@dataclass
class _Said:
    """Layers of which the same is said: the first one's name, how many, their kinds and sizes."""

    first: str
    count: int = 0
    kinds: dict[str, None] = field(default_factory=dict)  # in order
    sizes: dict[tuple[int, ...], None] = field(default_factory=dict)


_said: ContextVar[dict[str, _Said] | None] = ContextVar("said", default=None)


def warn_of(
    names: Sequence[Sequence[str]], what: str, kind: str = "", size: tuple[int, ...] = ()
) -> None:
    """Warn of layers, now or with all of which the same is said (`warnings_together`).

    Args:
        names: Of the modules of each.
        what: With places for their kinds, their sizes, and "it runs" or "they run", or with none.
        kind: Such as their scheme.
        size: Of a weight.
    """
    pending = _said.get()
    said = {} if pending is None else pending
    own = said.setdefault(what, _Said(" + ".join(names[0])))
    own.count += len(names)
    own.kinds[kind] = None
    own.sizes[size] = None
    if pending is None:
        _log(said)


@contextmanager
def warnings_together() -> Iterator[None]:
    """Warnings of layers inside are logged at the end, a line for each kind."""
    said: dict[str, _Said] = {}
    token = _said.set(said)
    try:
        yield
    finally:
        _said.reset(token)
        _log(said)


def _log(said: dict[str, _Said]) -> None:
    for what, own in said.items():
        others = f" and {own.count - 1} more" if own.count > 1 else ""
        runs = "they run" if others else "it runs"
        text = what.format(" or ".join(own.kinds), ", ".join(map(str, own.sizes)), runs)
        log.warning("%s%s: %s", own.first, others, text)
