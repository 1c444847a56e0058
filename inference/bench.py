"""`ptq bench`: tokens per second, latencies and memory of a checkpoint, at fixed lengths.

    ptq bench CHECKPOINT [--against ORIGINAL] [--batch 1 4 16] [--prompt 128] [--new 64]

Every request has the same number of prompt tokens, drawn at random, and generates the same number
of new ones: end tokens are ignored. Runs are repeated after a warm-up. With `--against` the two
models take turns (A B A B ...), so that what the machine does meanwhile hits both alike. Each model
runs in a process of its own, and the memory is that process's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from formats.checkpoint import Checkpoint
from formats.command import run_command
from formats.errors import RequestError
from formats.files import replace_file
from formats.scheme import Strict
from inference.bench_worker import Load, Run, Worker, run_once
from inference.config import EngineConfig
from inference.engine import Engine
from inference.kv_cache import blocks_for

Runner = Callable[[Load], Run]


class Spread(Strict):
    """Median of the repeated runs, with the least and the greatest."""

    median: float
    low: float
    high: float


class Percentiles(Strict):
    """Percentiles over all requests of all repeated runs."""

    p50: float
    p90: float
    p99: float


class Speed(Strict):
    """How fast an engine runs `batch` equal requests that arrive at once.

    Attributes:
        batch: Requests.
        prompt_tokens: Prompt tokens of each.
        new_tokens: Tokens that each generates.
        repeats: Runs that were measured.
        prefill_tokens_s: Prompt tokens of all requests, by the time until each has its first token.
        decode_tokens_s: Tokens per second of all requests together from then on.
        first_token_ms: Milliseconds from a request's arrival to its first token.
        per_token_ms: Milliseconds from a token to the next one of its request.
        peak_rss_bytes: Largest resident memory of the process so far, loading included.
        kv_bytes_per_token: Bytes of K and V of one token in all layers, as the engine holds them.
        weight_bytes: Bytes of the checkpoint's weight files.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    repeats: int
    prefill_tokens_s: Spread
    decode_tokens_s: Spread
    first_token_ms: Percentiles
    per_token_ms: Percentiles
    peak_rss_bytes: int
    kv_bytes_per_token: int
    weight_bytes: int


def measure_speed(
    engine: Engine,
    batch: int = 4,
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    warmup: int = 1,
    repeats: int = 3,
) -> Speed:
    """Measure one engine in this process.

    Args:
        engine: Idle, with room for the whole batch at once.
        batch: Requests that run together.
        prompt_tokens: Prompt tokens of each.
        new_tokens: Tokens that each generates; at least 2.
        warmup: Runs before those that count.
        repeats: Runs that count; at least 1.

    Raises:
        RequestError: the engine cannot hold the batch.
        EngineError: a request did not end as it should.
    """
    load = Load(batch=batch, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    return measure_in_turns([partial(run_once, engine)], load, warmup, repeats)[0]


def measure_in_turns(
    runners: Sequence[Runner], load: Load, warmup: int = 1, repeats: int = 3
) -> list[Speed]:
    """Measure several engines, which take turns: A B A B ...; arguments as in `measure_speed`."""
    if warmup < 0 or repeats < 1:
        raise RequestError(
            f"repeats: found {repeats} after {warmup} warm-up runs; at least one run must count",
            "repeats",
        )
    runs: list[list[Run]] = [[] for _ in runners]
    for turn in range(warmup + repeats):
        for runner, kept in zip(runners, runs, strict=True):
            run = runner(load)
            if turn >= warmup:
                kept.append(run)
    return [summarize(load, kept) for kept in runs]


def summarize(load: Load, runs: Sequence[Run]) -> Speed:
    """Put repeated runs of one load together."""
    prompt = load.batch * load.prompt_tokens
    return Speed(
        **load.model_dump(),
        repeats=len(runs),
        prefill_tokens_s=_spread([prompt / run.prefill_s for run in runs]),
        decode_tokens_s=_spread([run.decode_tokens / run.decode_s for run in runs]),
        first_token_ms=_percentiles_ms([run.first_token_s for run in runs]),
        per_token_ms=_percentiles_ms([run.per_token_s for run in runs]),
        peak_rss_bytes=runs[-1].peak_rss_bytes,
        kv_bytes_per_token=runs[-1].kv_bytes_per_token,
        weight_bytes=runs[-1].weight_bytes,
    )


def _spread(values: list[float]) -> Spread:
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


def _percentiles_ms(seconds: list[list[float]]) -> Percentiles:
    flat = np.concatenate([np.array(row) for row in seconds])
    p50, p90, p99 = (1000 * np.quantile(flat, [0.5, 0.9, 0.99])).tolist()
    return Percentiles(p50=p50, p90=p90, p99=p99)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 on success."""
    arguments = _parse(argv)
    paths = [path for path in (arguments.against, arguments.checkpoint) if path is not None]
    for path in paths:
        Checkpoint.open(path)  # a wrong path is told before processes start
    longest = arguments.prompt + arguments.new
    config = EngineConfig(
        max_batch_size=max(arguments.batch),
        max_model_len=longest,
        kv_blocks=max(arguments.batch) * blocks_for(longest),
    )
    results: list[list[tuple[str, Speed]]] = []  # by batch, then by model
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(str(path), config)) for path in paths]
        for batch in tqdm(sorted(set(arguments.batch)), desc="Measuring", unit="batch"):
            load = Load(batch=batch, prompt_tokens=arguments.prompt, new_tokens=arguments.new)
            runners = [worker.run for worker in workers]
            speeds = measure_in_turns(runners, load, arguments.warmup, arguments.repeats)
            results.append([(str(p), speed) for p, speed in zip(paths, speeds, strict=True)])
    print("\n".join(describe(results)))
    if arguments.json is not None:
        replace_file(arguments.json, _to_json(results).encode())
    return 0


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; a whole number from 1 on is needed")
    return int(text)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ptq bench",
        description="Measure tokens per second, latencies and memory, at fixed lengths.",
        epilog="Tokens/s are medians of the repeated runs, with the least and greatest in "
        "brackets; latencies are percentiles over all requests.",
    )
    parser.add_argument("checkpoint", type=Path, help="folder of a quantized or float model")
    parser.add_argument("--against", type=Path, metavar="ORIGINAL", help="compare with this model")
    parser.add_argument("--batch", type=_count, nargs="+", default=[1, 4, 16], metavar="N")
    parser.add_argument("--prompt", type=_count, default=128, metavar="TOKENS")
    parser.add_argument("--new", type=_count, default=64, metavar="TOKENS", help="at least 2")
    parser.add_argument("--warmup", type=_count, default=1, metavar="RUNS")
    parser.add_argument("--repeats", type=_count, default=3, metavar="RUNS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args(argv)
    if arguments.new < 2:
        parser.error("--new must be at least 2: one token has no time between tokens")
    return arguments


def describe(results: Sequence[Sequence[tuple[str, Speed]]]) -> list[str]:
    """Lines for a terminal: the machine, a table, and the ratios where two models ran.

    Args:
        results: For each batch size, the models' names and speeds.
    """
    first, machine = results[0][0][1], environment()
    rows = [_row(name, speed) for batch in results for name, speed in batch]
    lines = [
        f"{first.prompt_tokens} prompt + {first.new_tokens} new tokens a request, median of "
        f"{first.repeats} runs [least-greatest]; latencies in ms: p50 / p90 / p99",
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}",
        "",
        pd.DataFrame(rows).to_string(index=False),
    ]
    for pair in results:
        if len(pair) == 2:
            (_, a), (_, b) = pair
            prefill = b.prefill_tokens_s.median / a.prefill_tokens_s.median
            decode = b.decode_tokens_s.median / a.decode_tokens_s.median
            lines.append(
                f"batch {a.batch}: the second model runs prefill at {prefill:.2f}x and decode at "
                f"{decode:.2f}x the speed of the first"
            )
    return lines


def _row(name: str, speed: Speed) -> dict[str, str | int]:
    return {
        "model": name,
        "batch": speed.batch,
        "prefill tokens/s": _spread_text(speed.prefill_tokens_s),
        "decode tokens/s": _spread_text(speed.decode_tokens_s),
        "first token": _percentiles_text(speed.first_token_ms),
        "per token": _percentiles_text(speed.per_token_ms),
        "peak memory": f"{speed.peak_rss_bytes / 1e6:.0f} MB",
        "KV/token": f"{speed.kv_bytes_per_token} B",
        "weights": f"{speed.weight_bytes / 1e6:.1f} MB",
    }


def _spread_text(spread: Spread) -> str:
    return f"{spread.median:.0f} [{spread.low:.0f}-{spread.high:.0f}]"


def _percentiles_text(ms: Percentiles) -> str:
    return f"{ms.p50:.1f} / {ms.p90:.1f} / {ms.p99:.1f}"


def environment() -> dict[str, str | int]:
    """What measured times depend on beside the model: processor, threads, versions."""
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    """The processor's name; Linux keeps it from `platform`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _to_json(results: Sequence[Sequence[tuple[str, Speed]]]) -> str:
    rows = [{"model": name, **speed.model_dump()} for batch in results for name, speed in batch]
    return json.dumps({"environment": environment(), "results": rows}, indent=2) + "\n"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
