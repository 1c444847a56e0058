"""How long quantizing takes, by phase: a random model of a shape, random tokens, a shipped recipe.

    python -m ptq.time_quantizing w4_gptq --shape llama-3-8b --work /tmp/models
    python -m ptq.time_quantizing a8w8c8 --blocks 4 --set 'methods.0={smoothquant: {alpha: 0.9}}'
    python -m ptq.time_quantizing w4_gptq --blocks 6 --gpus 1 4

With `--gpus` it is run once on each of these numbers of GPUs, and shown beside the first: the share
of its time, and whether the checkpoint has the same bytes. `--cpus` does the same without GPUs.

With fewer blocks than the shape has, the whole is estimated from what one takes. The model is
written below the folder once; the checkpoint that is made is removed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from calibrate.data import TokenSet
from formats.command import CommandParser, count, run_command
from formats.files import sha256_file
from inference.bench.random_model import random_checkpoint
from inference.bench.shapes import read_shape
from ptq.pipeline.driver import quantize_tokens
from ptq.plan.plan import plan_recipe
from ptq.recipe.reading import read_recipe
from ptq.result import QuantizationResult, Stopwatch


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    arguments = parser().parse_args(argv)
    shape, blocks = _shape(arguments.work, arguments.shape, arguments.blocks)
    model = random_checkpoint(arguments.work, shape, "float")
    first: Timed | None = None
    for device in _devices(arguments):
        timed = _run(arguments, model, blocks, device)
        print("\n".join(timed.lines))
        if first is not None:
            print(_compared(timed, first))
        first = first or timed
    return 0


class Timed(NamedTuple):
    """One run.

    Attributes:
        lines: Its report, line by line.
        seconds: Of the whole shape.
        block: Of one block in the middle.
        hashes: SHA-256 of the checkpoint's files, by their path in it.
    """

    lines: list[str]
    seconds: float
    block: float
    hashes: dict[str, str]


def _devices(arguments: argparse.Namespace) -> list[str | None]:
    """What the recipe's `device` is set to, run by run; None leaves it as it is."""
    counts = {"gpus": arguments.gpus, "cpus": arguments.cpus}
    found = [f"{{{kind}: {n}}}" for kind, numbers in counts.items() for n in numbers or ()]
    return [*found] or [None]


def _run(arguments: argparse.Namespace, model: Path, blocks: int, device: str | None) -> Timed:
    output = arguments.work / f"{arguments.recipe}-output"
    amount = f"{{samples: {arguments.samples}, sequence_length: {arguments.length}}}"
    settings = [
        f"model.path={model}",
        f"output.path={output}",
        f"dataset.calibration={amount}",
        *arguments.set,
        *([] if device is None else [f"device={device}"]),
    ]
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    plan = plan_recipe(read_recipe(arguments.recipe, settings), force=True)
    tokens = random_tokens(arguments.samples, arguments.length, vocabulary)
    watch = BlockWatch()
    result = quantize_tokens(plan, tokens, force=True, progress=False, watch=watch)
    hashes = _hashes(result.checkpoint)
    shutil.rmtree(output)
    each = median([block.seconds for block in result.blocks])
    whole = result.seconds["total"] + (blocks - len(result.blocks)) * each
    title = [] if device is None else [f"device: {device}"]
    return Timed([*title, *lines(result, watch, blocks, whole)], whole, each, hashes)


def _hashes(checkpoint: Path) -> dict[str, str]:
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return {path.relative_to(checkpoint).as_posix(): sha256_file(path) for path in paths}


def _compared(timed: Timed, first: Timed) -> str:
    """A run beside the first one."""
    names = sorted(timed.hashes.keys() | first.hashes.keys())
    others = [name for name in names if timed.hashes.get(name) != first.hashes.get(name)]
    same = f"OTHER BYTES in {', '.join(others)}" if others else "the same bytes"
    whole, block = timed.seconds / first.seconds, timed.block / first.block
    return f"{whole:.0%} of the first run's time, a block {block:.0%}; {same}"


class BlockWatch(Stopwatch):
    """Counts seconds by phase of each block, too: one begins where it is loaded.

    Attributes:
        blocks: Seconds by phase; the first includes what precedes it, the last what follows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[dict[str, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time until the context is left for phase `name`."""
        if name == "load" or not self.blocks:
            self.blocks.append({})
        before = self.phases().get(name, 0.0)
        with super().phase(name):
            yield
        of_block = self.blocks[-1]
        of_block[name] = of_block.get(name, 0.0) + self.phases()[name] - before


def lines(result: QuantizationResult, watch: BlockWatch, blocks: int, whole: float) -> list[str]:
    """Seconds by phase, of a block in the middle, and of a model of so many blocks."""
    phases = sorted(result.seconds.items(), key=lambda item: -item[1])
    middle = watch.blocks[2:-1] or watch.blocks
    gpus = range(torch.cuda.device_count())
    peak = max(map(torch.cuda.max_memory_allocated, gpus), default=0)
    report = [f"{'':>12} {'run':>8} {'a block':>8}"]
    for name, seconds in phases:
        of_block = median([phases.get(name, 0.0) for phases in middle])
        of_block = (
            median(sum(phases.values()) for phases in middle) if name == "total" else of_block
        )
        report.append(f"{name:>12} {seconds:8.2f} {of_block:8.3f} s")
    memory = f"{result.peak_rss_bytes / 2**30:.1f} GiB of the host, {peak / 2**30:.1f} of the GPU"
    return [*report, f"{blocks} blocks: {whole:.1f} s; {memory}"]


def random_tokens(samples: int, length: int, vocabulary: int) -> TokenSet:
    """Tokens of which none is padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocabulary, (samples, length), generator=generator)
    return TokenSet(ids, torch.ones_like(ids, dtype=torch.bool), "random", "calibration")


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = CommandParser(prog="python -m ptq.time_quantizing", description=__doc__)
    made.add_argument("recipe", help="a shipped recipe's name, or a file")
    made.add_argument("--shape", default="llama-3-8b", help="as of `ptq bench`")
    made.add_argument("--blocks", type=count, help="of the model that is made (default: all)")
    made.add_argument("--samples", type=count, default=128, help="sequences (default: 128)")
    made.add_argument("--length", type=count, default=2048, help="tokens of one (default: 2048)")
    made.add_argument("--work", type=Path, default=Path("output/bench"), help="folder of models")
    made.add_argument("--set", action="append", default=[], help="as of `ptq run`")
    many = made.add_mutually_exclusive_group()
    many.add_argument(
        "--gpus", type=count, nargs="+", help="how many of them, a run for each number"
    )
    many.add_argument(
        "--cpus", type=count, nargs="+", help="the same with threads on the processor"
    )
    return made


def _shape(work: Path, shape: str, blocks: int | None) -> tuple[str, int]:
    """A shape with so many blocks, and how many it has itself."""
    name, config = read_shape(shape)
    all_blocks = int(config["num_hidden_layers"])
    if blocks is None or blocks == all_blocks:
        return shape, all_blocks
    folder = work / f"{name}-{blocks}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": blocks}))
    return str(folder), all_blocks


if __name__ == "__main__":
    raise SystemExit(run_command(main))
