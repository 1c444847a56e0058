"""`ptq bench`: tokens per second, latencies and memory of a checkpoint, at fixed lengths.

    ptq bench CHECKPOINT [--against ORIGINAL] [--batch 1 4 16] [--prompt 128] [--new 64]
    ptq bench CHECKPOINT --device cuda
    ptq bench --kernels
    ptq bench --shape llama-1.1b --scheme a8w4 --quantize-head --work DIR \
        --peer llama.cpp=envs/llama/bin/python --peer transformers

Every request has the same number of prompt tokens, drawn at random, and generates the same number
of new ones: end tokens are ignored. Runs are repeated after a warm-up. With `--against` and
`--peer` the models take turns (A B A B ...), so that what the machine does meanwhile hits all
alike; ratios are those of single turns. Each model runs in a process of its own, and the memory is
that process's.

`--shape` stands for a checkpoint of random weights, which is as fast as a real one; `--peer` runs
another runtime, with random weights of the same shape. Both keep their files in `--work`.
`--kernels` measures single ops beside torch's and the machine's limits (`kernels.bench.cpu`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

import kernels.bench.cpu as kernels_bench
from formats.checkpoint.read import Checkpoint
from formats.errors import EngineError, RequestError
from formats.families.names import HEAD
from formats.files import replace_file
from inference.backend import require_device
from inference.bench.figures import Ratio, Speed, compare_turns, describe, summarize, to_json
from inference.bench.peers.process import PeerWorker
from inference.bench.peers.specs import PEERS, read_peers
from inference.bench.random_checkpoint import SHAPES, random_checkpoint, read_shape
from inference.bench.worker import EngineSource, Load, Run, Worker, run_once
from inference.config import EngineConfig
from inference.engine import Engine
from inference.scheduling.blocks import blocks_for
from kernels.cpu import native

Runner = Callable[[Load], Run]


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
    return [summarize(load, runs) for runs in run_in_turns(runners, load, warmup, repeats)]


def run_in_turns(
    runners: Sequence[Runner], load: Load, warmup: int = 1, repeats: int = 3
) -> list[list[Run]]:
    """The runs behind `measure_in_turns`, of each engine in the order of the turns."""
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
    return runs


class Model(NamedTuple):
    """Something that runs loads: what it is called, what it is, and how it is run."""

    name: str
    note: str
    run: Runner


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 on success."""
    arguments = _parse(argv)
    if arguments.kernels:
        return _measure_kernels()
    results: list[list[tuple[str, Speed]]] = []  # by batch, then by model
    ratios: list[Ratio] = []
    with ExitStack() as stack:
        models = _start_models(stack, arguments)
        for batch in tqdm(sorted(set(arguments.batch)), desc="Measuring", unit="batch"):
            load = Load(batch=batch, prompt_tokens=arguments.prompt, new_tokens=arguments.new)
            runners = [model.run for model in models]
            runs = run_in_turns(runners, load, arguments.warmup, arguments.repeats)
            named = [(model.name, own) for model, own in zip(models, runs, strict=True)]
            results.append([(name, summarize(load, own)) for name, own in named])
            ratios += [compare_turns(load, named[-1], other) for other in named[:-1]]
    notes = [model.note for model in models]
    print("\n".join(describe(results, ratios, notes, arguments.device)))
    if arguments.json is not None:
        replace_file(arguments.json, to_json(results, ratios, notes, arguments.device).encode())
    return 0


def _measure_kernels() -> int:
    if native.library() is None:
        raise EngineError("there are no compiled kernels to measure; install a C++ compiler (g++)")
    limits, found = kernels_bench.measure_limits(), []
    for case in tqdm(kernels_bench.cases(), desc="Measuring", unit="op"):
        kernels_bench.in_turns(case)
        found.append(case)
    print(kernels_bench.describe(limits))
    print(kernels_bench.table(found, limits).to_string(index=False))
    return 0


def _start_models(stack: ExitStack, arguments: argparse.Namespace) -> list[Model]:
    """Start what the command line asks for, the checkpoint last; faults are told before that.

    Raises:
        RequestError: a shape, scheme or peer is unknown.
        CheckpointError: a checkpoint is none.
        EngineError: the device is not one that is run on; a peer lacks its package, or fails.
    """
    require_device(arguments.device)
    work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ptq-")))
    path, shape = _place(arguments, work)
    config = _engine_config(arguments)
    sources = [_source(arguments, path, config)]
    if arguments.against is not None:
        sources.insert(0, replace(sources[0], path=str(arguments.against), random=None))
    checkpoints = [source.checkpoint() for source in sources]
    ours = checkpoints[-1]
    specs = read_peers(arguments.peer, arguments.peer_format, arguments.peer_kv, ours.scheme)
    for spec in specs:
        spec.check_installed()
    peers = [PeerWorker(spec, ours.config, shape, work) for spec in specs]
    peers = [stack.enter_context(peer) for peer in peers]
    engines = [stack.enter_context(Worker(source)) for source in sources]
    names = [source.path for source in sources]
    if arguments.shape is not None:
        names[-1] = Path(names[-1]).name
    rows = zip(names, checkpoints, engines, strict=True)
    models = [Model(n, f"{n}: {_about(found)}", worker.run) for n, found, worker in rows]
    for kind in arguments.against_kv:
        kept = config.model_copy(update={"kv_dtype": kind})
        source = replace(sources[-1], config=kept, quantized_kv=False)
        worker = stack.enter_context(Worker(source))
        name = f"{names[-1]}, {kind} cache"
        models.insert(-1, Model(name, f"{name}: the same weights", worker.run))
    return [*models[:-1], *(Model(p.name, p.note, p.run) for p in peers), models[-1]]


def _place(arguments: argparse.Namespace, work: Path) -> tuple[Path, str]:
    """Folder of the checkpoint that is measured, and what its shape is called.

    Where a shape stands for it, it is made first; for a GPU it is made there, when it is loaded.
    """
    if arguments.shape is None:
        return arguments.checkpoint, arguments.checkpoint.resolve().name
    (name, _), scheme = read_shape(arguments.shape), arguments.scheme
    if arguments.device != "cpu":
        return Path(f"{name}-{scheme}"), name
    head = arguments.quantize_head
    return random_checkpoint(work, arguments.shape, scheme, quantize_head=head), name


def _source(arguments: argparse.Namespace, path: Path, config: EngineConfig) -> EngineSource:
    random = None
    if arguments.shape is not None and arguments.device != "cpu":
        random = (arguments.shape, arguments.scheme, arguments.quantize_head)
    return EngineSource(str(path), config, device=arguments.device, random=random)


def _about(checkpoint: Checkpoint) -> str:
    scheme, head = checkpoint.scheme, checkpoint.scheme_of(HEAD)
    parts = [scheme.of_layers.text, f"head {head.text}"]
    if scheme.kv_cache is not None:
        parts.append(f"cache {scheme.kv_cache.dtype} {scheme.kv_cache.granularity}")
    return "; ".join(parts)


def _engine_config(arguments: argparse.Namespace) -> EngineConfig:
    longest = arguments.prompt + arguments.new
    return EngineConfig(
        max_batch_size=max(arguments.batch),
        max_model_len=longest,
        kv_blocks=max(arguments.batch) * blocks_for(longest),
    )


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; a whole number from 1 on is needed")
    return int(text)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ptq bench",
        description="Measure tokens per second, latencies and memory, at fixed lengths.",
        epilog="Tokens/s are medians of the repeated runs, with the least and greatest in "
        "brackets; latencies are percentiles over all requests; ratios are those of single turns.",
    )
    parser.add_argument(
        "checkpoint", type=Path, nargs="?", help="folder of a quantized or float model"
    )
    parser.add_argument("--against", type=Path, metavar="ORIGINAL", help="compare with this model")
    parser.add_argument(
        "--against-kv",
        choices=["float32", "bfloat16"],
        action="append",
        default=[],
        help="compare with the same model and a cache of this type",
    )
    parser.add_argument("--kernels", action="store_true", help="measure ops instead of a model")
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda or cuda:N")
    parser.add_argument("--batch", type=_count, nargs="+", default=[1, 4, 16], metavar="N")
    parser.add_argument("--prompt", type=_count, default=128, metavar="TOKENS")
    parser.add_argument("--new", type=_count, default=64, metavar="TOKENS", help="at least 2")
    parser.add_argument("--warmup", type=_count, default=1, metavar="RUNS")
    parser.add_argument("--repeats", type=_count, default=3, metavar="RUNS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    _add_shape_arguments(parser)
    _add_peer_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.kernels:
        return arguments
    if arguments.new < 2:
        parser.error("--new must be at least 2: one token has no time between tokens")
    if (arguments.checkpoint is None) == (arguments.shape is None):
        parser.error("give the folder of a checkpoint, or --shape for one of random weights")
    if (arguments.shape is None) != (arguments.scheme is None):
        parser.error("--shape and --scheme go together")
    if arguments.quantize_head and arguments.shape is None:
        parser.error("--quantize-head is for --shape: a checkpoint has the head that it has")
    return arguments


def _add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("random weights instead of a checkpoint")
    group.add_argument(
        "--shape", help=f"{', '.join(SHAPES)}, or a config.json or a folder that holds one"
    )
    group.add_argument("--scheme", help="a preset of recipes, such as a8w4, or float for bf16")
    group.add_argument("--quantize-head", action="store_true", help="int8 head, inputs per token")
    group.add_argument(
        "--work", type=Path, metavar="DIR", help="keep what is made there; default: nothing is kept"
    )


def _add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("other runtimes, on random weights of the same shape")
    group.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[=PYTHON]",
        help=f"{', '.join(PEERS)}; PYTHON is the interpreter of an environment that has it",
    )
    formats = ", ".join(name for peer in PEERS.values() for name in peer.formats)
    caches = ", ".join(dict.fromkeys(name for peer in PEERS.values() for name in peer.caches))
    group.add_argument(
        "--peer-format", nargs="+", default=[], metavar="FORMAT", help=f"their weights: {formats}"
    )
    group.add_argument(
        "--peer-kv", nargs="+", default=[], metavar="TYPE", help=f"their cache: {caches}"
    )
