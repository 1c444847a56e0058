"""What the times of runs come to: speeds, ratios of runs that took turns, and their text.

Models take turns, A B A B ..., so that what the machine does meanwhile hits all alike.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from formats.documents import Strict
from formats.errors import RequestError
from formats.namespace import later
from inference.bench.load import Load, Run
from inference.speculate.counts import DraftCounts
from kernels.bench.case import in_turns

with later():
    import pandas as pd


class Spread(Strict):
    """Median of the repeated runs, with the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of one value a run."""
        each = list(values)
        return cls(median=statistics.median(each), low=min(each), high=max(each))

    def text(self, digits: int, unit: str = "") -> str:
        """For a terminal."""
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return f"{self.median:.{digits}f}{unit} [{low}-{high}]"


class Percentiles(Strict):
    """Percentiles over all requests of all repeated runs."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of_ms(cls, seconds: Iterable[list[float]]) -> Percentiles:
        """Milliseconds, of the seconds of each run's requests."""
        flat = np.concatenate([np.array(row) for row in seconds])
        p50, p90, p99 = (1000 * np.quantile(flat, [0.5, 0.9, 0.99])).tolist()
        return cls(p50=p50, p90=p90, p99=p99)

    def text(self) -> str:
        """For a terminal."""
        return f"{self.p50:.1f} / {self.p90:.1f} / {self.p99:.1f}"


class Drafts(Strict):
    """What became of drafts in all repeated runs.

    Attributes:
        steps: Times that a request had drafts in a step.
        proposed: Drafts that were computed, by their position after the last token, as far as
            there were any.
        accepted: Those that were accepted, by position.
        tokens_per_step: Mean tokens of a request in a step in which it had drafts; 1 without any.
    """

    steps: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    tokens_per_step: float


class Speed(Strict):
    """How fast an engine runs `batch` requests that arrive at once.

    Attributes:
        batch: Requests.
        prompt_tokens: Prompt tokens of each; of a task's the most of any, as for `new_tokens`.
        requests: Requests of a run, where they are a task's and `batch` of them run at once.
        prefill_tokens_s: Prompt tokens of all requests, by the time until each has its first token.
        decode_tokens_s: Tokens per second of all requests together from then on.
        first_token_ms: Milliseconds from a request's arrival to its first token.
        per_token_ms: Milliseconds from a token to the next one of its request.
        drafts: What became of drafts; None where the engine makes none.

    Bytes are as of `inference.bench.load.Run`.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    requests: int | None = None
    repeats: int
    prefill_tokens_s: Spread
    decode_tokens_s: Spread
    first_token_ms: Percentiles
    per_token_ms: Percentiles
    peak_memory_bytes: int
    kv_bytes_per_token: int
    weight_bytes: int
    drafts: Drafts | None = None


class Ratio(Strict):
    """How many times as fast one model is as another, of the runs of each turn.

    Attributes:
        batch: Requests.
        model: The one whose speed is given.
        reference: The one whose speed is 1.
        prefill: Of the times until each request has its first token.
        decode: Of the tokens per second from then on.
    """

    batch: int
    model: str
    reference: str
    prefill: Spread
    decode: Spread


def summarize(load: Load, runs: Sequence[Run]) -> Speed:
    """Put repeated runs of one load together."""
    prompt, last, counts = load.all_prompt_tokens, runs[-1], drafts_of(runs)
    return Speed(
        **load.model_dump(exclude={"token", "task"}),
        requests=None if load.task is None else len(load.task.prompts),
        repeats=len(runs),
        prefill_tokens_s=Spread.of(prompt / run.prefill_s for run in runs),
        decode_tokens_s=Spread.of(run.decode_tokens_s for run in runs),
        first_token_ms=Percentiles.of_ms(run.first_token_s for run in runs),
        per_token_ms=Percentiles.of_ms(run.per_token_s for run in runs),
        peak_memory_bytes=last.peak_memory_bytes,
        kv_bytes_per_token=last.kv_bytes_per_token,
        weight_bytes=last.weight_bytes,
        drafts=_drafts(counts) if counts.proposed else None,
    )


def drafts_of(runs: Sequence[Run]) -> DraftCounts:
    """What became of drafts in several runs."""
    return sum((run.drafts for run in runs), start=DraftCounts())


def _drafts(counts: DraftCounts) -> Drafts:
    deepest = max((i + 1 for i, count in enumerate(counts.proposed) if count), default=0)
    proposed, accepted = (c[:deepest] for c in (counts.proposed, counts.accepted))
    own = {"steps": counts.steps, "tokens_per_step": counts.tokens_per_step}
    return Drafts(proposed=proposed, accepted=accepted, **own)


def compare_turns(
    load: Load, model: tuple[str, Sequence[Run]], reference: tuple[str, Sequence[Run]]
) -> Ratio:
    """Ratios of runs of one load that took turns, the n-th of a model to the n-th of another: these
    are steadier than the speeds themselves."""
    turns = list(zip(model[1], reference[1], strict=True))
    return Ratio(
        batch=load.batch,
        model=model[0],
        reference=reference[0],
        prefill=Spread.of(theirs.prefill_s / ours.prefill_s for ours, theirs in turns),
        decode=Spread.of(ours.decode_tokens_s / theirs.decode_tokens_s for ours, theirs in turns),
    )


def describe(
    results: Sequence[Sequence[tuple[str, Speed]]],
    ratios: Sequence[Ratio] = (),
    notes: Sequence[str] = (),
    device: str = "cpu",
) -> list[str]:
    """Lines for a terminal: the machine, what runs, a table, and the ratios.

    Args:
        results: For each batch size, the models' names and speeds.
    """
    first, machine = results[0][0][1], environment(device)
    rows = [_row(name, speed) for batch in results for name, speed in batch]
    most = "" if first.requests is None else f"{first.requests} requests of at most "
    return [
        f"{most}{first.prompt_tokens} prompt + {first.new_tokens} new tokens a request, median of "
        f"{first.repeats} runs [least-greatest]; latencies in ms: p50 / p90 / p99",
        f"{machine.get('gpu', machine['processor'])}, {machine['threads']} threads, torch "
        f"{machine['torch']}",
        *notes,
        "",
        pd.DataFrame(rows).to_string(index=False),
        *[
            f"batch {ratio.batch}: {ratio.model} runs prefill at {ratio.prefill.text(2, 'x')} and "
            f"decode at {ratio.decode.text(2, 'x')} the speed of {ratio.reference}"
            for ratio in ratios
        ],
    ]


def _row(name: str, speed: Speed) -> dict[str, str | int]:
    prefill, decode = speed.prefill_tokens_s, speed.decode_tokens_s
    return {
        "model": name,
        "batch": speed.batch,
        "prefill tokens/s": prefill.text(int(prefill.median < 100)),
        "decode tokens/s": decode.text(int(decode.median < 100)),
        "first token": speed.first_token_ms.text(),
        "per token": speed.per_token_ms.text(),
        "peak memory": f"{speed.peak_memory_bytes / 1e6:.0f} MB",
        "KV/token": f"{speed.kv_bytes_per_token} B",
        "weights": f"{speed.weight_bytes / 1e6:.1f} MB",
    }


def environment(device: str = "cpu") -> dict[str, str | int]:
    """What measured times depend on beside the model: processor, GPU, threads, versions."""
    info = Path("/proc/cpuinfo")  # Linux keeps the processor's name from `platform`
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(named, platform.processor() or platform.machine())
    own = {} if device == "cpu" else {"gpu": torch.cuda.get_device_name(device)}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"processor": processor, **own, "threads": torch.get_num_threads(), **versions}


def to_json(
    results: Sequence[Sequence[tuple[str, Speed]]],
    ratios: Sequence[Ratio],
    notes: Sequence[str],
    device: str = "cpu",
) -> str:
    """All of it for a program; arguments as in `describe`."""
    rows = [{"model": name, **speed.model_dump()} for batch in results for name, speed in batch]
    document = {"environment": environment(device), "notes": list(notes), "results": rows}
    document["ratios"] = [ratio.model_dump() for ratio in ratios]
    return json.dumps(document, indent=2) + "\n"


Runner = Callable[[Load], Run]


def measure_in_turns(
    runners: Sequence[Runner], load: Load, warmup: int = 1, repeats: int = 3
) -> list[Speed]:
    """The speeds of models that take turns; arguments and errors as of `run_in_turns`."""
    return [summarize(load, runs) for runs in run_in_turns(runners, load, warmup, repeats)]


def run_in_turns(
    runners: Sequence[Runner], load: Load, warmup: int = 1, repeats: int = 3
) -> list[list[Run]]:
    """The runs that count of models that take turns, A B A B ..., of each in order.

    Args:
        runners: Run a load once; see `inference.bench.load.run_once`.
        warmup: Runs of each before those that count.
        repeats: Runs that count; at least 1.

    Raises:
        RequestError: no run would count, or an engine cannot hold the load.
        EngineError: a request did not end as it should.
    """
    if warmup < 0 or repeats < 1:
        raise RequestError(
            f"repeats: found {repeats} after {warmup} warm-up runs; at least one run must count",
            "repeats",
        )
    runs = in_turns([partial(runner, load) for runner in runners], range(warmup + repeats))
    return [own[warmup:] for own in runs]
