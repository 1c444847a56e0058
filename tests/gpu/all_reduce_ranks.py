"""What ranks in processes of their own do in tests of sums over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

WAYS = ("one_shot", "two_shot", "library")


def parts_of(ranks: int, rows: int, hidden: int, integers: bool, seed: int = 0) -> torch.Tensor:
    """The same on every rank: [ranks, rows, hidden] on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    if integers:
        shape = (ranks, rows, hidden)
        return torch.randint(-30000, 30000, shape, generator=generator, dtype=torch.int32)
    return torch.randn(ranks, rows, hidden, generator=generator).bfloat16()


def others(rows: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same on every rank and GPU: a residual, a norm's weight, scales of outputs."""
    generator = torch.Generator().manual_seed(1)
    residual = torch.randn(rows, hidden, generator=generator).bfloat16()
    weight = torch.rand(hidden, generator=generator).bfloat16()
    return residual.cuda(), weight.cuda(), (weight.float() + 0.5).cuda()


def sums_on_a_rank(
    rank: int, device: torch.device, at: Any, hidden: int, rows: tuple[int, ...]
) -> Any:
    """Sums each way and in a replayed graph: what differs from the one-GPU kernel, told by name."""
    from kernels.triton.collective.all_reduce import AllReduce

    wrong = []
    reduce = AllReduce.over(dist.group.WORLD, device, max(rows), hidden)
    for count in rows:
        for integers in (False, True):
            wrong += sums_of(rank, reduce, at, count, integers)
    return wrong


def sums_of(rank: int, reduce: Any, at: Any, rows: int, integers: bool) -> list[str]:
    """The same of some rows."""
    from kernels.triton import fused
    from kernels.triton.collective import reference
    from kernels.triton.collective.all_reduce import Scaling

    sizes, wrong = reduce.memory.sizes, []
    residual, weight, factors = others(rows, sizes.hidden)
    one = torch.full((1,), 0.02, device=residual.device)
    scaling = Scaling(one / 1000, factors, factors) if integers else None
    parts = parts_of(sizes.ranks, rows, sizes.hidden, integers).to(residual.device)
    x = reference.sum_of_parts(list(parts), torch.bfloat16, scaling)
    wanted = wanted_of(fused, reference, x, integers, residual, weight, one)

    def call() -> tuple:
        mine = parts[rank].clone()
        return reduce.add_rms_norm(mine, residual, weight, 1e-5, one, scaling=scaling)

    for way in WAYS:
        if way == "one_shot" and rows > sizes.few:
            continue
        reduce.way, what = way, (way, rows, integers)
        at(f"summing {rows} rows by {way}, integers: {integers}")
        q, _, total = call()
        torch.cuda.synchronize()
        reduce.check()
        wrong += told(what, q, total, wanted, exact=integers or way != "library")
        if way != "library" or dist.get_backend() == "nccl":  # gloo is not captured
            wrong += replayed(what, call, q, total)
    return wrong


def many_exchanges(rank: int, device: torch.device, at: Any, hidden: int) -> list[str]:
    """Exchanges in replayed graphs while the GPU does other work: which way gave up, if any."""
    from kernels.triton.collective.all_reduce import AllReduce
    from kernels.triton.common import alone

    reduce = AllReduce.over(dist.group.WORLD, device, 16, hidden, patience=2.0)
    x, weight, wrong = torch.ones(16, hidden, device=device).bfloat16(), others(1, hidden)[1], []
    large, beside = torch.randn(4096, 4096, device=device).bfloat16(), torch.cuda.Stream()
    for way in WAYS[:2]:
        reduce.way, graph = way, torch.cuda.CUDAGraph()
        at(f"exchanging again and again by {way}")
        with alone():
            reduce.add_rms_norm(x, x, weight, 1e-5)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for _ in range(100):
                    reduce.add_rms_norm(x, x, weight, 1e-5)
        for _ in range(40):
            dist.barrier()
            with torch.cuda.stream(beside):
                for _ in range(12):
                    large @ large
            for _ in range(20):
                graph.replay()
            torch.cuda.synchronize()
        wrong += [way] if reduce._fault.item() else []
        reduce._fault.zero_()
    return wrong


def wanted_of(fused, reference, x, integers, residual, weight, scale) -> tuple:
    """(rows, sum): by the kernel of one GPU for integers, whose sum it takes as it is."""
    if integers:
        q, _, total = fused.add_rms_norm(x.bfloat16(), residual, weight, 1e-5, scale)
    else:
        q, _, total = reference.add_rms_norm([x], residual, weight, 1e-5, scale)
    return q, total


def told(what, q, total, wanted, exact: bool) -> list[str]:
    """What is wrong with a result."""
    rows, total_wanted = wanted
    off = (q.int() - rows.int()).abs().max().item()
    bits = torch.equal(total, total_wanted)
    near = (total.float() - total_wanted.float()).abs().max().item()
    fine = (bits and off <= (0 if what[2] else 1)) if exact else near < 0.1
    return [] if fine else [f"{what}: rows off by {off}, sums by {near}, same bits: {bits}"]


def replayed(what, call, q, total) -> list[str]:
    """What differs where a graph of three calls is replayed four times, between other calls."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    q, total = q.clone(), total.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        kept = [tuple(t.clone() for t in call()[::2]) for _ in range(3)]
    for turn in range(4):
        graph.replay()
        if turn == 2:
            call()
    torch.cuda.synchronize()
    same = all(torch.equal(a, q) and torch.equal(b, total) for a, b in kept)
    return [] if same else [f"{what}: a replay gave something else"]
