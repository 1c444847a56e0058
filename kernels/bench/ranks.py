"""Ranks of this machine's GPUs in processes, to measure and to test sums over them."""

from __future__ import annotations

import os
import queue
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 300.0  # after which ranks that have not answered are ended
STILL = 20.0  # seconds that a rank may be at one thing; a kernel gives up sooner
START = 120.0  # the same of its start: libraries are read, and connections made

At = Callable[[str], None]
"""Says to whoever started the ranks what one is at."""


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
