"""Sums over ranks (`ptq bench --kernels all_reduce`): each way beside its floor and NCCL.

Ranks are processes with a GPU each, in which sums are tested, too (`on_ranks`). A time is that of a
call in a replayed CUDA graph of many, with parts that no cache holds; each starts when the one
ahead has ended; the median of the slowest rank counts. "library" is NCCL and the one-GPU kernel
after it, "NCCL alone" its sum alone. The floor is that of the bytes: a rank receives the parts of
its share of the rows, and the results of the rest, as fast as a large copy to a peer goes.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from kernels.bench.case import copies_of, replay
from kernels.triton.collective import reference
from kernels.triton.collective.all_reduce import AllReduce, Scaling
from kernels.triton.collective.choice import BOUNDS, Way
from kernels.triton.collective.memory import Sizes, over_group
from kernels.triton.common import alone

SIZES = ((1, 4096), (16, 4096), (1, 8192), (64, 8192), (1024, 8192))  # rows, hidden
KINDS = (  # types of a part and of what comes out
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
    (torch.int32, torch.int8),
)
WAYS: tuple[Way, ...] = ("one_shot", "two_shot", "library")
ALONE = "NCCL alone"
SECONDS = 300.0  # after which ranks that have not answered are ended
STILL = 20.0  # seconds that a rank may be at one thing; a kernel gives up sooner
START = 120.0  # the same of its start: libraries are read, and connections made
At = Callable[[str], None]
"""Says to whoever started the ranks what one is at."""


class Effort(NamedTuple):
    """How much is measured: least where ranks share a GPU, and a call takes many milliseconds."""

    calls: int = 40
    turns: int = 40


@dataclass
class SumRow:
    """A sum as measured.

    Attributes:
        us: Microseconds of each way.
        chosen: The way that the engine takes.
        floor: Microseconds that the bytes take over the links.
    """

    rows: int
    hidden: int
    part: str
    result: str
    chosen: str
    floor: float
    us: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SumCase:
    """Sums of one size on a rank.

    Attributes:
        parts: Of this rank, [copies, rows, hidden].
        all_parts: Of all ranks for the first call.
    """

    reduce: AllReduce
    parts: Tensor
    all_parts: Tensor
    residual: Tensor
    weight: Tensor
    scale: Tensor | None
    dtype: torch.dtype
    scaling: Scaling | None

    @classmethod
    def of(cls, reduce: AllReduce, rows: int, kinds: tuple[torch.dtype, torch.dtype]) -> SumCase:
        """Drawn from one seed on all ranks."""
        sizes, device = reduce.memory.sizes, torch.device("cuda", torch.cuda.current_device())
        draw, (kind, dtype) = torch.Generator(device).manual_seed(rows), kinds
        shape = (rows, sizes.hidden)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=draw, device=device)

        parts = normal(sizes.ranks, *shape)
        parts = (parts * 3000).to(kind) if kind == torch.int32 else parts.to(kind)
        factors = normal(sizes.hidden).abs() * 1e-2
        copies = copies_of(parts[0].nbytes, most=8)
        one = torch.full((1,), 0.03, device=device)
        return cls(
            reduce, parts[reduce.memory.rank].expand(copies, -1, -1).contiguous(), parts,
            normal(*shape).bfloat16(), normal(sizes.hidden).bfloat16(),
            one if dtype == torch.int8 else None, dtype,
            Scaling(one, factors) if kind == torch.int32 else None,
        )  # fmt: skip

    def call(self, i: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """The i-th call, by the way that is set."""
        return self.reduce.add_rms_norm(
            self.parts[i % len(self.parts)], self.residual, self.weight, 1e-5, self.scale,
            self.dtype, scaling=self.scaling,
        )  # fmt: skip

    def check(self) -> None:
        """Raise ValueError where a result is off."""
        kept = self.parts[0].clone()
        rows, _, total = self.call(0)
        torch.cuda.synchronize()
        self.reduce.check()
        self.parts[0].copy_(kept)  # the library sums in place
        wanted, _, sums = reference.add_rms_norm(
            list(self.all_parts), self.residual, self.weight, 1e-5, self.scale, self.dtype,
            scaling=self.scaling,
        )  # fmt: skip
        off = (total.float() - sums.float()).abs().max() / sums.float().abs().max()
        rows_off = (rows.float() - wanted.float()).abs().max()
        bound = 2.0 if self.dtype == torch.int8 else 0.05 * wanted.float().abs().max()
        if not (off < 0.02 and rows_off <= bound):
            way = self.reduce.way
            raise ValueError(f"{way} of {tuple(total.shape)}: off by {off:.3g} and {rows_off:.3g}")

    def floor(self, rate: float) -> float:
        """Microseconds by the bytes at so many bytes a microsecond."""
        ranks, elements = self.reduce.memory.sizes.ranks, self.residual.numel()
        nbytes = self.parts.itemsize + self.dtype.itemsize + self.residual.itemsize
        return (ranks - 1) / ranks * elements * nbytes / rate


def on_a_rank(
    rank: int, device: torch.device, at: At, sizes: tuple[tuple[int, int], ...]
) -> tuple[float, list[SumRow]]:
    """What one rank measures: bytes a microsecond to its neighbour, and a row a case."""
    group = dist.group.WORLD
    assert group is not None
    own_gpus = dist.get_backend() == "nccl"
    effort, rows = Effort() if own_gpus else Effort(2, 2), []
    at("measuring copies to a peer")
    rate = copy_rate(group, device, effort)
    for hidden in dict.fromkeys(hidden for _, hidden in sizes):
        counts = [count for count, size in sizes if size == hidden]
        at(f"sharing memory for rows of {hidden}")
        reduce = AllReduce.over(group, device, max(counts), hidden)
        for count in counts:
            for kinds in KINDS:
                case = SumCase.of(reduce, count, kinds)
                rows.append(row_of(case, rate, effort, own_gpus, at))
    return rate, rows


def row_of(case: SumCase, rate: float, effort: Effort, own_gpus: bool, at: At) -> SumRow:
    """Every way of a case, and NCCL."""
    reduce, (_, count, hidden) = case.reduce, case.parts.shape
    kind, dtype = (str(each)[6:] for each in (case.parts.dtype, case.dtype))
    chosen = reduce.way_of(case.parts[0], case.dtype)
    row = SumRow(count, hidden, kind, dtype, chosen, case.floor(rate))
    for way in WAYS:
        if (way == "one_shot" and count > reduce.memory.sizes.few) or (
            way == "library" and not own_gpus  # gloo is not captured
        ):
            continue
        reduce.way, what = way, f"{way} of {count} x {hidden}, {kind} -> {dtype}"
        at(f"checking {what}")
        case.check()
        at(f"measuring {what}")
        row.us[way] = timed(case.call, effort)
        reduce.check()
    reduce.way = None
    if own_gpus:
        at(f"measuring NCCL alone of {count} x {hidden}, {kind}")
        floats = case.parts if case.scaling is None else case.parts.clone()
        row.us[ALONE] = timed(lambda i: dist.all_reduce(floats[i % len(floats)]), effort)
    return row


def timed(call: Callable[[int], Any], effort: Effort) -> float:
    """Microseconds of a call on this rank: the median of replays that all ranks start at once."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with alone():
        for i in range(2):
            call(i)
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(effort.calls):
                call(i)
    taken = []
    for _ in range(effort.turns):
        dist.barrier()
        torch.cuda.synchronize()
        taken.append(replay(graph, effort.calls, call))
    return statistics.median(taken)


def copy_rate(group: dist.ProcessGroup, device: torch.device, effort: Effort) -> float:
    """Bytes a microsecond of a large copy to the next rank, while all copy."""
    ranks = dist.get_world_size(group)
    memory = over_group(group, device, Sizes(ranks, hidden=8192, few=1, most=1024))
    there = memory.views("totals", torch.uint8)[(memory.rank + 1) % ranks]
    here = torch.empty_like(there)
    taken = timed(lambda i: there.copy_(here), effort)
    torch.cuda.synchronize()
    dist.barrier()  # the memory stays until all have written
    return there.nbytes / taken


def measure(arguments: argparse.Namespace) -> int:
    """Measure on so many ranks, print a table, and write it where asked to; 0."""
    ranks = arguments.ranks or default_ranks(torch.cuda.device_count())
    start = time.monotonic()
    found = on_ranks(ranks, on_a_rank, SIZES)
    rate = min(rate for rate, _ in found)
    rows = [slowest(list(same)) for same in zip(*(rows for _, rows in found), strict=True)]
    shared = torch.cuda.device_count() < ranks
    print(*lines(ranks, rate, rows, shared), sep="\n")
    print(f"- {time.monotonic() - start:.0f} s")
    if arguments.json is not None:
        data = {"ranks": ranks, "shared_gpu": shared, "rate": rate, "rows": list(map(asdict, rows))}
        arguments.json.write_text(json.dumps(data, indent=2), encoding="utf-8")
    return 0


def default_ranks(gpus: int) -> int:
    """The most that kernels are for and GPUs are there for; two where there is one GPU."""
    return max((ranks for ranks in BOUNDS if ranks <= gpus), default=2)


def slowest(rows: list[SumRow]) -> SumRow:
    """One case as its slowest rank saw it."""
    first = rows[0]
    first.us = {way: max(row.us[way] for row in rows) for way in first.us}
    return first


def lines(ranks: int, rate: float, rows: list[SumRow], shared: bool) -> Iterator[str]:
    """The table."""
    yield f"{torch.cuda.get_device_name()}, {ranks} ranks, copy to a peer {rate / 1e3:.0f} GB/s"
    if shared:
        yield "- ranks take turns on one GPU: results are checked, times mean nothing"
    titles = (*WAYS, ALONE)
    heads = "".join(f"{title:>12}" for title in titles)
    yield f"{'rows x hidden':>14} {'part -> result':>20} {'floor':>8}{heads}"
    for row in rows:
        times = (f"{row.us[way]:.1f}" if way in row.us else "-" for way in titles)
        marks = ("*" if way == row.chosen and way in row.us else " " for way in titles)
        cells = "".join(f"{us:>11}{mark}" for us, mark in zip(times, marks, strict=True))
        size, kind = f"{row.rows} x {row.hidden}", f"{row.part} -> {row.result}"
        yield f"{size:>14} {kind:>20} {row.floor:>8.1f}{cells}"
    yield "- microseconds; * is the way that the engine takes"


def on_ranks(count: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """work(rank, device, at, *arguments) in a process for each rank, in a group of all of them.

    Ranks have a GPU each and NCCL between them, or, where there are fewer GPUs, the first GPU, in
    turns, and gloo: results are right then, times mean nothing.

    Args:
        work: A function of a module; its results must be picklable. It calls at(what) with
            what it is going to do, each time.
        arguments: Picklable.

    Returns:
        What each rank's call returned.

    Raises:
        RuntimeError: a rank failed, ended, was at one thing for longer than `STILL`, or took
            longer than `SECONDS`; all are ended then.
    """
    context = mp.get_context("spawn")
    with TemporaryDirectory() as folder:
        answers = context.Queue()
        common = (count, str(Path(folder) / "ranks"), answers, work, arguments)
        processes = [context.Process(target=_run, args=(rank, *common)) for rank in range(count)]
        for process in processes:
            process.start()
        try:
            return _collect(processes, answers)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(processes: list[Any], answers: Any) -> list[Any]:
    found: dict[int, Any] = {}
    end = time.monotonic() + SECONDS
    doing = dict.fromkeys(range(len(processes)), (time.monotonic() + START, "starting"))
    while len(found) < len(processes):
        with suppress(queue.Empty):
            rank, kind, result = answers.get(timeout=0.5)
            if kind == "failed":
                raise RuntimeError(f"rank {rank} failed while {doing[rank][1]}:\n{result}")
            if kind == "at":
                doing[rank] = time.monotonic() + STILL, result
            else:
                found[rank] = result
        for rank, process in enumerate(processes):
            if rank not in found and process.exitcode not in (None, 0):
                raise RuntimeError(f"rank {rank} ended with exit code {process.exitcode}")
        late = {rank: what for rank, (until, what) in doing.items() if time.monotonic() > until}
        if late.keys() - found.keys():
            each = "; ".join(
                f"rank {rank} has ended" if rank in found else f"rank {rank} is {what}"
                for rank, (_, what) in doing.items()
            )
            raise RuntimeError(f"ranks stand still, for {STILL:g} seconds or more: {each}")
        if time.monotonic() > end:
            late = [rank for rank in range(len(processes)) if rank not in found]
            raise RuntimeError(f"ranks {late} did not answer within {SECONDS:g} seconds")
    return [found[rank] for rank in range(len(processes))]


def _run(
    rank: int, count: int, store: str, answers: Any, work: Callable[..., Any], arguments: Any
) -> None:
    def at(what: str) -> None:
        answers.put((rank, "at", what))

    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    shared = torch.cuda.device_count() < count
    device = torch.device("cuda", 0 if shared else rank)
    try:
        torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo" if shared else "nccl", init_method=f"file://{store}", rank=rank,
            world_size=count, device_id=None if shared else device,
        )  # fmt: skip
        answers.put((rank, "found", work(rank, device, at, *arguments)))
    except Exception:  # whoever started the ranks raises it
        answers.put((rank, "failed", traceback.format_exc()))
    answers.close()
    answers.join_thread()
    time.sleep(SECONDS)  # peers may still use this rank's memory: whoever started it ends it


def _end_with(parent: int) -> None:
    """End this process with the one that started it, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
