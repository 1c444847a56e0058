"""All-reduce over the GPUs of a host that share a layer, with what follows it in one kernel.

    sum             y = x_0 + x_1 + ...              of the parts x_p that the ranks have
    add_rms_norm    what `kernels.triton.fused.add_rms_norm` does with y

Every rank calls the same with rows of the same number, in the same order, and gets the same bits.
Calls can be captured in CUDA graphs, if all ranks capture the same; replays need nothing between
them. `kernels.triton.collective.choice` says which kernel runs, or NCCL.

Sums of integer products become floats by the scales and the bias of a `Scaling`.
"""

# pyright: reportArgumentType=false
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.triton import fused
from kernels.triton.collective.choice import Way, choose, most_rows_of
from kernels.triton.collective.memory import SharedMemory, Sizes, of_one_process, over_group
from kernels.triton.collective.shots import one_shot_kernel, two_shot_kernel
from kernels.triton.collective.words import KIND
from kernels.triton.common import require, storage
from kernels.triton.fused import LARGEST_ROW, QUANTIZED, launch_shape, outputs_of


@dataclass(frozen=True)
class Scaling:
    """What makes floats of integer sums, as the GEMM of one GPU does.

    Attributes:
        x_scale: fp32, one element or [rows, 1], the same on all ranks.
        w_scale: fp32 [hidden].
        bias: fp32 [hidden], added once, or None.
    """

    x_scale: Tensor
    w_scale: Tensor
    bias: Tensor | None = None

    def check(self, rows: int, hidden: int) -> None:
        """Raise ValueError unless it is of so many rows and outputs."""
        found = self.x_scale.numel()
        require(found in (1, rows), f"{found} scales for {rows} rows of parts")
        for what, tensor in (("scales", self.w_scale), ("biases", self.bias)):
            shape = None if tensor is None else tuple(tensor.shape)
            require(shape in (None, (hidden,)), f"{what} of outputs are {shape}, not ({hidden},)")

    def of(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """int32 [rows, hidden] in a float type, rounded as `kernels.reference.int8_linear` does."""
        one = self.x_scale.numel() == 1
        x_scale = self.x_scale.reshape(()) if one else self.x_scale.reshape(-1, 1)
        y = sums.float() * (x_scale * self.w_scale)
        return (y if self.bias is None else y + self.bias).to(dtype)


PATIENCE = 10.0  # seconds that a kernel waits for a rank
AWAITED = (  # by what a kernel leaves of it in its fault
    "part of a sum (one-shot kernel)",
    "part of a sum (two-shot kernel)",
    "results of a sum (two-shot kernel)",
)
GIVEN_UP = -1  # a fault that the host sets
LONGEST = 2000.0  # seconds whose microseconds an int32 holds
FLOATS = (torch.bfloat16, torch.float16)


@dataclass
class AllReduce:
    """Sums over ranks, for one stream.

    Attributes:
        memory: What peers write.
        dtype: The model's float type, of sums and residuals.
        group: By which torch sums; None where ranks are of one process, and it cannot.
        patience: Seconds that a kernel waits for a rank.
        way: The only way to take; None for that of `kernels.triton.collective.choice`.
    """

    memory: SharedMemory
    dtype: torch.dtype
    group: dist.ProcessGroup | None = None
    patience: float = PATIENCE
    way: Way | None = None
    _counts: Tensor = field(init=False)  # exchanges of each row: one-shot, two-shot, as waited for
    _fault: Tensor = field(init=False)
    _half: int = field(init=False, default=0)
    _partial: int = field(init=False, default=0)  # address of the last sum, where not `whole_sum`

    def __post_init__(self) -> None:
        sizes, device = self.memory.sizes, self.memory.regions[self.memory.rank].device
        require(
            self.dtype in FLOATS,
            f"sums are asked for in {self.dtype}; supported are {', '.join(map(str, FLOATS))}",
        )
        require(
            sizes.hidden % 8 == 0 and 0 < sizes.hidden <= LARGEST_ROW,
            f"rows are of {sizes.hidden}; needed is a multiple of 8, {LARGEST_ROW} at most",
        )
        require(
            0 < self.patience < LONGEST,
            f"patience is {self.patience} s; needed is more than 0 and less than {LONGEST:g}",
        )
        rows = max(sizes.few, sizes.most)
        self._counts = torch.zeros((3, rows), dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._fault = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        device: torch.device,
        most_rows: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        patience: float = PATIENCE,
    ) -> AllReduce:
        """Over a group of ranks with a GPU of this host each, which all call this at once.

        Args:
            group: 2, 4 or 8 ranks.
            most_rows: The most rows that one call has. It sizes the shared memory, up to the most
                rows that the kernels take; larger calls go by NCCL.
            hidden: Elements of a row.
            dtype: The model's float type.
            patience: Seconds that a kernel waits for a rank.

        Raises:
            ValueError: a number or type is not supported.
        """
        ranks = dist.get_world_size(group)
        sizes = Sizes(ranks, hidden, *most_rows_of(ranks, hidden, most_rows))
        return cls(over_group(group, device, sizes), dtype, group, patience)

    @classmethod
    def of_one_process(
        cls, ranks: int, device: torch.device, most_rows: int, hidden: int, dtype: torch.dtype
    ) -> list[AllReduce]:
        """Of each rank, where ranks are streams of one device: for tests and measurements."""
        sizes = Sizes(ranks, hidden, *most_rows_of(ranks, hidden, most_rows))
        return [cls(memory, dtype) for memory in of_one_process(device, sizes)]

    def check(self) -> None:
        """Raise RuntimeError where a kernel gave up waiting, with the rank that did not come.

        No device is waited for: the faults seen up to now count.
        """
        late = int(self._fault[0])
        if late == GIVEN_UP:
            raise RuntimeError(f"rank {self.memory.rank} was made to wait for no sum any more")
        if late:
            kind, rank = divmod(late - 1, KIND)
            raise RuntimeError(
                f"rank {rank} did not take part in a sum for {self.patience:g} seconds: rank "
                f"{self.memory.rank} waited for its {AWAITED[kind]} and gave up, and what it "
                "computed since is wrong; end all ranks"
            )

    def give_up(self) -> None:
        """Have all kernels that wait for a rank go on within some 50 ms, as ranks are gone."""
        if not int(self._fault[0]):
            self._fault[0] = GIVEN_UP

    def sum(self, x: Tensor, scaling: Scaling | None = None) -> Tensor:
        """The sum over ranks alone: [rows, hidden] in the float type; see `add_rms_norm`."""
        return self.add_rms_norm(x, None, None, 0.0, None, self.dtype, scaling=scaling)[2]

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        scale: Tensor | None = None,
        dtype: torch.dtype = torch.int8,
        group: int | None = None,
        residual_ready: bool = False,
        after: Tensor | None = None,
        scaling: Scaling | None = None,
        whole_sum: bool = True,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Norm of the sum over ranks + residual; as `kernels.triton.fused.add_rms_norm` gives it.

        Args:
            x: This rank's part [rows, hidden], contiguous, in the float type, or int32 with a
                `scaling`. Floats are added in fp32. It may be overwritten.
            residual: [rows, hidden] in the float type, or None. It is the same on all ranks.
            weight: Float [hidden], or None where the sum is not normed.
            eps: Added to the mean square.
            scale: fp32, one element, or None for a scale a row (or none, in a float type).
            dtype: Of the rows: int8, float8_e4m3fn or a float type.
            group: 128 for a scale each run of so many, None for a scale a row.
            residual_ready: Whether it was there before the kernel ahead of this started.
            after: Float [hidden], the weight of the norm of the sum before it is added; or None.
            scaling: What makes floats of integers; None for parts of floats.
            whole_sum: Whether all rows of the sum are needed. False where it is only the residual
                of the next call: then fewer bytes go over the links, and a rank may have only the
                rows that it has summed.

        Returns:
            (rows [rows, hidden] in `dtype`, their scales or None, the sum). The call after the next
            may overwrite them, and so may the next one where another graph is replayed between.

        Raises:
            ValueError: a shape or type does not fit.
        """
        step = _Step(x, residual, weight, eps, scale, dtype, group, residual_ready, after, scaling)
        step.check(self.memory.sizes.hidden, self.dtype)
        way = self.way or self.way_of(x, dtype)
        if residual is not None and residual.data_ptr() == self._partial:
            way = "two_shot"  # other ranks have the other rows
        self._partial, whole = 0, whole_sum or step.ends_in_sum(self.dtype)
        if not len(x) or way == "library":
            pieces = self.way is None and scaling is not None and dtype.itemsize <= 2
            return self._piece_by_piece(step) if pieces and len(x) else self._by_library(step)
        return self._one_shot(step) if way == "one_shot" else self._two_shot(step, whole)

    def way_of(self, x: Tensor, dtype: torch.dtype) -> Way:
        """The way of a call with this part and results of this type."""
        sizes = self.memory.sizes
        most = sizes.most if dtype.itemsize <= 2 else 0
        return choose(sizes.ranks, x.nbytes, len(x), sizes.few, most)

    def _one_shot(self, step: _Step) -> tuple[Tensor, Tensor | None, Tensor]:
        x, (rows, hidden), sizes = step.x, step.x.shape, self.memory.sizes
        require(rows <= sizes.few, f"{rows} rows; there is room for {sizes.few}")
        out, scales = outputs_of(x, hidden, step.scale, step.dtype, step.group)
        total = torch.empty_like(x, dtype=self.dtype)
        kept = None if step.ends_in_sum(self.dtype) else out
        one_shot_kernel[(rows,)](
            x.view(torch.int32), self.memory.views("words", torch.int64), self._counts[0],
            *self._watch(), *step.factors, step.residual, step.after, step.weight, total,
            None if kept is None else storage(kept), scales, step.scale, step.eps, rows,
            hidden, hidden, RANK=self.memory.rank, MOST=sizes.few, READY=step.residual_ready,
            **step.shape(kept),
        )  # fmt: skip
        return total if kept is None else kept, scales, total

    def _two_shot(self, step: _Step, whole: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        memory, (rows, hidden), self._half = self.memory, step.x.shape, 1 - self._half
        most, rank = memory.sizes.most, memory.rank
        require(rows <= most, f"{rows} rows; there is room for {most}")
        totals = memory.views("totals", self.dtype, (rows, hidden), self._half)
        outs, scales = None, None
        if not step.ends_in_sum(self.dtype):
            outs, scales = self._results(step)
        kept = None if outs is None else outs[rank]
        two_shot_kernel[(rows + 1,)](
            step.x, memory.views("parts", step.x.dtype), memory.views("arrived", torch.int32),
            memory.views("done", torch.int32), self._counts[1], self._counts[2], *self._watch(),
            *step.factors, step.residual, step.after, step.weight, totals,
            None if outs is None else tuple(map(storage, outs)), scales, step.scale, step.eps,
            rows, rows, hidden, hidden, RANK=rank, WHOLE=whole, **step.shape(kept),
        )  # fmt: skip
        self._partial = 0 if whole else totals[rank].data_ptr()
        own = step.scale if scales is None else scales[rank]
        return totals[rank] if kept is None else kept, own, totals[rank]

    def _results(self, step: _Step) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
        """Rows of every rank and their scales, as `kernels.triton.fused.outputs_of` makes them."""
        rows, hidden = step.x.shape
        require(
            step.dtype.itemsize <= 2, f"rows in {step.dtype}; there is room for 16 bits an element"
        )
        outputs_of(step.x[:0], hidden, step.scale, step.dtype, step.group)  # checks
        outs = self.memory.views("rows", step.dtype, (rows, hidden), self._half)
        if step.scale is not None or step.dtype not in QUANTIZED:
            return outs, None
        runs = -(-hidden // (step.group or hidden))
        scales = self.memory.views("scales", torch.float32, (runs, rows), self._half)
        return outs, tuple(each.t() for each in scales)

    def _piece_by_piece(self, step: _Step) -> tuple[Tensor, Tensor | None, Tensor]:
        """More rows of integers than there is room for; results are moved out of the way. It takes
        half of the time of NCCL, whose sums are still to be scaled."""
        x, ranks = step.x, self.memory.sizes.ranks
        rows = self.memory.sizes.most // ranks * ranks  # a row stays with its rank
        out, scales = outputs_of(x, x.shape[1], step.scale, step.dtype, step.group)
        total, single = torch.empty_like(x, dtype=self.dtype), step.ends_in_sum(self.dtype)
        for first in range(0, len(x), rows):
            own = slice(first, first + rows)
            some, its_scales, sums = self._two_shot(step.rows(own), True)
            total[own] = sums
            if not single:
                out[own] = some
            if scales is not None and scales is not step.scale and its_scales is not None:
                scales[own] = its_scales
        return total if single else out, scales, total

    def _by_library(self, step: _Step) -> tuple[Tensor, Tensor | None, Tensor]:
        x = step.x
        if len(x):
            require(self.group is not None, "ranks of one process have no library to sum them")
            dist.all_reduce(x, group=self.group)
        y = x if step.scaling is None else step.scaling.of(x, self.dtype)
        return fused.add_rms_norm(
            y, step.residual, step.weight, step.eps, step.scale, step.dtype, step.group,
            step.residual_ready, step.after,
        )  # fmt: skip

    def _watch(self) -> tuple[Tensor, int]:
        """Where a kernel tells that it gave up, and after how many microseconds."""
        return self._fault, int(self.patience * 1e6)


@dataclass(frozen=True)
class _Step:
    """The arguments of `AllReduce.add_rms_norm`."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    eps: float
    scale: Tensor | None
    dtype: torch.dtype
    group: int | None
    residual_ready: bool
    after: Tensor | None
    scaling: Scaling | None

    def check(self, hidden: int, dtype: torch.dtype) -> None:
        """Raise ValueError where something does not fit rows of so many of a float type."""
        x, kind = self.x, dtype if self.scaling is None else torch.int32
        require(
            x.dtype == kind and x.dim() == 2 and x.shape[1] == hidden and x.is_contiguous(),
            f"the part is {x.dtype} {tuple(x.shape)}; needed is contiguous {kind} [rows, {hidden}]"
            + ("" if self.scaling is None else ", since a scaling is given"),
        )
        if self.scaling is not None:
            self.scaling.check(len(x), hidden)
        before = self.residual
        require(self.after is None or before is not None, "what is normed first is added")
        fits = before is None or (before.shape == x.shape and before.is_contiguous())
        require(fits, "the residual must be contiguous and of the shape of the part")
        for weight in (self.weight, self.after):
            found = None if weight is None else tuple(weight.shape)
            require(found in (None, (hidden,)), f"norm weight is {found}; needed is ({hidden},)")

    def rows(self, own: slice) -> _Step:
        """The same of some rows."""
        residual, scaling = self.residual, self.scaling
        if scaling is not None and scaling.x_scale.numel() > 1:
            scaling = replace(scaling, x_scale=scaling.x_scale.reshape(-1, 1)[own])
        residual = None if residual is None else residual[own]
        return replace(self, x=self.x[own], residual=residual, scaling=scaling)

    def ends_in_sum(self, dtype: torch.dtype) -> bool:
        """Whether the rows are the sum, in the float type."""
        return self.weight is None and self.dtype == dtype

    @property
    def factors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What makes floats of integers."""
        own = self.scaling
        return (None, None, None) if own is None else (own.x_scale, own.w_scale, own.bias)

    def shape(self, out: Tensor | None) -> dict[str, Any]:
        """Arguments by name that both kernels take."""
        rows, hidden = self.x.shape
        per_row = int(self.scaling is not None and self.scaling.x_scale.numel() > 1)
        own = launch_shape(hidden, self.scale is not None, self.group, out, rows)
        return {"PER_ROW": per_row, **own}
