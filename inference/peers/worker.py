"""What runs in a peer's own interpreter: loads a model of a shape, and runs loads on it.

    python worker.py prepare|serve

Lines of JSON come on standard input, and each has one answer on standard output. The first is the
job; see `Job`. `prepare` writes the files of the model, where they are not there, and answers
`{"ready": {}}`: in a process of its own, so that its memory is not the model's. `serve` loads them
and answers `{"ready": {"note": ...}}`. Each line after it is a load, `batch`, `prompt_tokens` and
`new_tokens`, answered by `{"run": ...}` with the fields of `inference.bench_worker.Run`. Whatever
goes wrong is `{"error": ...}`. What packages print goes to standard error.

Nothing of this project is imported here, as the peer's environment need not have it. The job names
an adapter, a file with `load(job) -> model`, and `prepare(job)` where there are files to write. A
model has `note`, `weight_bytes`, `kv_bytes_per_token` and `run(prompts, new_tokens)`, which decodes
all prompts together, greedily, and gives the times (`time.perf_counter`) before the first and after
each token of all of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import resource
import sys
import traceback
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

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
        "peak_rss_bytes": peak_rss_bytes(),
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "weight_bytes": model.weight_bytes,
    }


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss may be that of the process that started this one
        line = next(row for row in status.read_text().splitlines() if row.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def load_adapter(path: str) -> ModuleType:
    """The adapter's module, under a name that shadows no package."""
    spec = importlib.util.spec_from_file_location("peer_adapter", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(what: str, lines: TextIO, out: TextIO) -> None:
    """Do the job of the first line, and the loads of the others."""

    def send(**record: Any) -> None:
        print(json.dumps(record), file=out, flush=True)

    job = Job(**json.loads(lines.readline()))
    adapter = load_adapter(job.adapter)
    if what == "prepare":
        adapter.prepare(job)
        send(ready={})
        return
    model = adapter.load(job)
    send(ready={"note": model.note})
    for line in lines:
        send(run=run_load(model, job.config["vocab_size"], json.loads(line)))


def main(arguments: list[str]) -> int:
    """The command; an error is its last answer, its trace on standard error."""
    private = os.dup(1)
    os.dup2(2, 1)  # packages that print must not be taken for answers
    with os.fdopen(private, "w") as out:
        try:
            answer(arguments[0], sys.stdin, out)
        except Exception as error:  # whatever a package raises is this process's answer
            traceback.print_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(json.dumps({"error": reason}), file=out, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its files are no packages
    raise SystemExit(main(sys.argv[1:]))
