"""What it costs a GPU to go from one kernel to the next: `ptq bench --kernels links`.

A decode step of one request is some nine kernels a block, each of which waits for the one before
it. Three ways to have that order are measured, with kernels that do nothing else:

- a kernel after a kernel in a CUDA graph;
- the same where the next may start early (programmatic dependent launch; `common.overlap`);
- a barrier between the programs of one kernel that are all on the device at once, by a count in
  memory that only grows.

Microseconds a link, medians of graph replays. What products, norms and attention take beside their
floors is in the other families' tables: memory stands idle from the end of one to when the next
has enough reads under way, which is more than the link alone.
"""

# pyright: reportMissingImports=false, reportArgumentType=false
from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from kernels.bench.case import replay
from kernels.triton.common import ASM, alone, announce, overlap, wait
from kernels.triton.tuning import multiprocessors

CHAIN, FEW, MANY = 288, 100, 600  # kernels of a graph, barriers of a short and of a long kernel
WARM_UP, TURNS = 3, 20  # replays
ARRIVE = tl.constexpr("""{ .reg .pred first; .reg .b32 t;
mov.u32 t, %tid.x;
setp.eq.u32 first, t, 0;
@first red.release.gpu.global.add.u32 [$1], 1;
mov.b32 $0, 0; }""")
# The first thread looks until the count is there, at most 2^16 times (about 50 ms): should programs
# not fit on the device together, the count is wrong in the end, and nothing hangs.
AWAIT = tl.constexpr("""{ .reg .pred first, more; .reg .b32 t, found, looks;
mov.u32 t, %tid.x;
setp.ne.u32 first, t, 0;
@first bra DONE;
mov.u32 looks, 0;
AGAIN:
ld.acquire.gpu.global.u32 found, [$1];
sub.s32 found, found, $2;
setp.ge.s32 more, found, 0;
@more bra DONE;
add.u32 looks, looks, 1;
setp.lt.u32 more, looks, 65536;
@more bra AGAIN;
DONE:
mov.b32 $0, 0; }""")


@triton.jit
def empty_kernel(OVERLAP: tl.constexpr):
    """Nothing but the order."""
    wait(OVERLAP)
    announce(OVERLAP)


@triton.jit(do_not_specialize=["times"])
def barriers_kernel(count, times, PROGRAMS: tl.constexpr):
    """So many barriers of all programs."""
    done = tl.load(count, volatile=True) // PROGRAMS
    for i in range(times):
        tl.debug_barrier()
        if ASM:
            tl.inline_asm_elementwise(
                ARRIVE, "=r,l", [count], dtype=tl.int32, is_pure=False, pack=1
            )
            tl.inline_asm_elementwise(
                AWAIT, "=r,l,r", [count, (done + i + 1) * PROGRAMS],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        tl.debug_barrier()


@dataclass(frozen=True)
class Link:
    """One way from a kernel, or a phase of one, to the next.

    Attributes:
        way: `kernel`, `early kernel` or `barrier`.
        us: Microseconds.
    """

    programs: int
    way: str
    us: float


def chain(programs: int) -> None:
    """Launch empty kernels of so many programs."""
    for _ in range(CHAIN):
        empty_kernel[(programs,)](**overlap())


def measured(run: Callable[[], object]) -> float:
    """Microseconds of what `run` launches, as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = [replay(graph, 1, lambda i: None) for _ in range(WARM_UP + TURNS)]
    return statistics.median(times[WARM_UP:])


def barrier(programs: int, device: torch.device) -> float:
    """Microseconds of a barrier of so many programs.

    Raises:
        RuntimeError: they did not wait for each other.
    """
    count = torch.zeros(1, dtype=torch.int32, device=device)
    few, many = (
        measured(partial(barriers_kernel[(programs,)], count, times, PROGRAMS=programs))
        for times in (FEW, MANY)
    )
    launches = 1 + WARM_UP + TURNS  # of each
    if int(count) != programs * launches * (FEW + MANY):
        raise RuntimeError(f"{programs} programs did not wait for each other")
    return (many - few) / (MANY - FEW)


def links(device: torch.device) -> Iterator[Link]:
    """All of them: of one program, of one a multiprocessor, and of two; raises as `barrier`."""
    each = multiprocessors(device)
    for programs in (1, each, 2 * each):
        run = partial(chain, programs)
        with alone():
            yield Link(programs, "kernel", measured(run) / CHAIN)
        yield Link(programs, "early kernel", measured(run) / CHAIN)
    for programs in (each, 2 * each):
        yield Link(programs, "barrier", barrier(programs, device))


def table(found: list[Link]) -> str:
    """In Markdown."""
    lines = ["| us | programs | |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {x.way} | {x.programs} | {x.us:.2f} |" for x in found)])


def measure(arguments: argparse.Namespace, device: torch.device) -> int:
    """Measure and print; 0."""
    found = list(links(device))
    name = torch.cuda.get_device_name(device)
    print(f"{name}, what a link between two kernels takes\n\n{table(found)}")
    if arguments.json is not None:
        data = {"device": name, "links": [asdict(link) for link in found]}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0
