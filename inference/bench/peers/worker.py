"""What runs in a peer's own interpreter: loads a model of a shape, and runs loads on it.

    python child.py worker.py prepare|serve

Lines of JSON come on standard input, and each has one answer on standard output. The first is the
job; see `Job`. `prepare` writes the files of the model, where they are not there, and answers
`{"ready": {}}`: in a process of its own, so that its memory is not the model's. `serve` loads them
and answers `{"ready": {"note": ...}}`. Each line after it is a load, `batch`, `prompt_tokens` and
`new_tokens`, answered by `{"run": ...}` with the fields of `inference.bench.worker.Run`. Whatever
goes wrong is `{"error": ...}`. What packages print goes to standard error.

The job names an adapter, a file with `load(job) -> model`, and `prepare(job)` where there are files
to write. A model has `note`, `weight_bytes`, `kv_bytes_per_token` and `run(prompts, new_tokens)`,
which decodes all prompts together, greedily, and gives the times (`time.perf_counter`) before the
first and after each token of all of them.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from peer_child import (  # pyright: ignore[reportMissingImports]
    load_adapter,
    peak_rss_bytes,
    reason_of,
)

SEED = 0


@dataclass(frozen=True)
class Job:
    """What an adapter is given.

    Attributes:
        adapter: Its file.
        config: config.json of the shape.
        name: Of the shape, unlike that of any other; files are named after it.
        work: Folder for files.
        format: How weights are stored.
        cache: Type of the cache, None for the default.
        threads: Threads that it may use.
    """

    adapter: str
    config: dict[str, Any]
    name: str
    work: str
    format: str
    cache: str | None
    threads: int

    def path(self, *parts: str) -> Path:
        """Path of a file of this shape, its name made of parts."""
        return Path(self.work) / "-".join([self.name, *parts])


def run_load(model: Any, vocabulary: int, load: dict[str, int]) -> dict[str, Any]:
    """Run a load once; gives the fields of a `Run`."""
    batch, new = load["batch"], load["new_tokens"]
    numbers = random.Random(SEED)
    prompts = [
        [numbers.randrange(vocabulary) for _ in range(load["prompt_tokens"])] for _ in range(batch)
    ]
    times = model.run(prompts, new)
    if len(times) != new + 1:
        raise ValueError(f"{new} tokens were asked for, {len(times) - 1} came")
    steps = [b - a for a, b in pairwise(times)]
    return {
        "prefill_s": steps[0],
        "decode_s": times[-1] - times[1],
        "decode_tokens": batch * (new - 1),
        "first_token_s": steps[:1] * batch,
        "per_token_s": steps[1:] * batch,
        "peak_memory_bytes": peak_rss_bytes(),
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "weight_bytes": model.weight_bytes,
    }


def answer(what: str, lines: SimpleQueue[str], out: TextIO) -> None:
    """Do the job of the first line, and the loads of the others."""

    def send(**record: Any) -> None:
        print(json.dumps(record), file=out, flush=True)

    job = Job(**json.loads(lines.get()))
    adapter = load_adapter(job.adapter)
    if what == "prepare":
        adapter.prepare(job)
        send(ready={})
        return
    model = adapter.load(job)
    send(ready={"note": model.note})
    while True:
        send(run=run_load(model, job.config["vocab_size"], json.loads(lines.get())))


def main(arguments: list[str], lines: SimpleQueue[str]) -> int:
    """What `peer_child` runs; an error is its last answer."""
    private = os.dup(1)
    os.dup2(2, 1)  # packages that print must not be taken for answers
    with os.fdopen(private, "w") as out:
        try:
            answer(arguments[0], lines, out)
        except Exception as error:  # whatever a package raises is this process's answer
            print(json.dumps({"error": reason_of(error)}), file=out, flush=True)
            return 1
    return 0
