"""Whole requests of checkpoints and of other runtimes, in turns: `ptq bench` without a mode.

Each model is in a process of its own, so that its memory is its own too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from formats.checkpoint.read import Checkpoint
from formats.command import bar, end_with
from formats.errors import EngineError, PTQError, RequestError
from formats.families.block_layers import HEAD
from formats.files import replace_file
from inference.arguments import read_adapters, speculate_config
from inference.backend import require_device
from inference.bench import figures
from inference.bench.load import TOKEN, Load, Oracle, Run, chance_of, run_once
from inference.bench.peers.runtimes import MeasuredModel, read_choices, started
from inference.bench.random_model import RandomCheckpoint, random_checkpoint, random_engine
from inference.bench.shapes import read_shape
from inference.bench.tasks import make_task
from inference.config import EngineConfig
from inference.engine import Engine
from inference.scheduling.blocks import blocks_for

FAKED = (
    "drafts are faked: what making them takes is in no figure, and one token is all that comes, by "
    "a bias, without drafts too"
)


def measure_requests(arguments: argparse.Namespace) -> int:
    """Measure what `inference.bench.command.parse` read, and print; 0 on success."""
    results: list[list[tuple[str, figures.Speed]]] = []  # by batch, then by model
    ratios: list[figures.Ratio] = []
    drafts: list[str] = []
    first = _load(arguments)
    with ExitStack() as stack:
        models = _start_models(stack, arguments, first)
        for batch in bar(sorted(set(arguments.batch)), title="Measuring", unit="batch"):
            load = first.model_copy(update={"batch": batch})
            runners = [model.run for model in models]
            runs = figures.run_in_turns(runners, load, arguments.warmup, arguments.repeats)
            named = [(model.name, own) for model, own in zip(models, runs, strict=True)]
            results.append([(name, figures.summarize(load, own)) for name, own in named])
            (name, last), others = named[-1], named[:-1]
            ratios += [figures.compare_turns(load, (name, last), other) for other in others]
            if arguments.speculate is not None or arguments.acceptance is not None:
                drafts.append(f"batch {batch}: {name}: {figures.drafts_of(last).text()}")
    notes = [model.note for model in models]
    notes += [] if arguments.acceptance is None else [FAKED]
    notes += [] if first.task is None else [first.task.note]
    measured = results, ratios, notes, arguments.device
    print("\n".join([*figures.describe(*measured), *drafts]))
    if arguments.json is not None:
        replace_file(arguments.json, figures.to_json(*measured).encode())
    return 0


def _load(arguments: argparse.Namespace) -> Load:
    """The load that is asked for, of the least batch.

    Raises:
        CheckpointError: a task is asked for, and the model has no tokenizer.
        RequestError: a task cannot be made.
    """
    batch = min(arguments.batch)
    if arguments.task is None:
        token = None if arguments.acceptance is None else TOKEN
        lengths = {"prompt_tokens": arguments.prompt, "new_tokens": arguments.new}
        return Load(batch=batch, token=token, **lengths)
    task = make_task(arguments.task, arguments.checkpoint, arguments.new)
    longest = max(map(len, task.prompts))
    return Load(batch=batch, prompt_tokens=longest, new_tokens=max(task.lengths), task=task)


def _start_models(
    stack: ExitStack, arguments: argparse.Namespace, load: Load
) -> list[MeasuredModel]:
    """Start what the command line asks for, the checkpoint last; faults are reported before that.

    `load` tells how long requests are.

    Raises:
        RequestError: a shape, scheme or peer is unknown.
        CheckpointError: a checkpoint is none.
        EngineError: the device is not one that is run on; a peer lacks its package, or fails.
    """
    require_device(arguments.device)
    work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ptq-")))
    own, shape = _source(arguments, work, load)
    ours, name = own.checkpoint(), own.path if arguments.shape is None else Path(own.path).name
    sources: list[tuple[str, str, EngineSource]] = []  # with names, and what they are
    if arguments.against is not None:
        other = replace(own, path=str(arguments.against), random=None, fake=None)
        sources.append((other.path, _about(other.checkpoint()), other))
    for text, made in _variants(arguments, own):
        sources.append((f"{name}, {text}", "the same weights", made))
    sources.append((name, "; ".join([_about(ours), *_about_run(own)]), own))
    choices = read_choices(arguments.peer, arguments.peer_format, arguments.peer_kv, ours.scheme)
    for choice in choices:
        choice.check_installed()
    peers = [stack.enter_context(started(peer, ours.config, shape, work)) for peer in choices]
    workers = [stack.enter_context(EngineProcess(source)) for _, _, source in sources]
    rows = zip(sources, workers, strict=True)
    *others, last = (MeasuredModel(n, f"{n}: {about}", work.run) for (n, about, _), work in rows)
    return [*others, *peers, last]


def _faked(arguments: argparse.Namespace) -> tuple[float, int | None] | None:
    """Tokens a step that drafts are faked to give, and how many (None: auto); None without.

    Raises:
        RequestError: their number is not given, or they cannot give so many tokens.
    """
    if arguments.acceptance is None:
        return None
    if arguments.speculate is not None or arguments.depth is None:
        raise RequestError(
            "--acceptance fakes drafts: give --depth N or --depth auto with it, and no --speculate",
            "acceptance",
        )
    depth = arguments.depth if isinstance(arguments.depth, int) else None
    chance_of(arguments.acceptance, depth)
    return arguments.acceptance, depth


def _variants(
    arguments: argparse.Namespace, source: EngineSource
) -> Iterator[tuple[str, EngineSource]]:
    """The same checkpoint run in other ways, and what these are called."""
    config = source.config

    def changed(**settings: object) -> EngineSource:
        return replace(source, config=config.model_copy(update=settings))

    if config.speculate is not None or source.fake is not None:
        yield "no drafts", replace(changed(speculate=None), fake=None)
    if source.adapters:
        yield "no adapters", replace(source, adapters={})
    if config.invariant:
        yield "not invariant", changed(invariant=False)
    if config.tensor_parallel > 1:
        yield "one rank", changed(tensor_parallel=1)
    for kind in arguments.against_kv:
        yield f"{kind} cache", replace(changed(kv_dtype=kind), quantized_kv=False)
    if arguments.against_transformers_code:
        yield "transformers' code", changed(transformers_code=True)


def _source(arguments: argparse.Namespace, work: Path, load: Load) -> tuple[EngineSource, str]:
    """The checkpoint as it is asked for, with room for a load, and what its shape is called.

    Where a shape stands for it, it is made first; for a GPU it is made there, when it is loaded.
    Errors as of `_faked`.
    """
    longest, most = load.prompt_tokens + load.new_tokens, max(arguments.batch)
    config = EngineConfig(
        max_batch_size=most,
        max_model_len=longest,
        kv_blocks=most * blocks_for(longest),
        prefix_cache=False,  # each run of a load is to compute its prompts
        invariant=arguments.invariant,
        tensor_parallel=arguments.tensor_parallel,
        speculate=None if arguments.acceptance is not None else speculate_config(arguments),
    )
    own: dict[str, Any] = {"fake": _faked(arguments), "adapters": read_adapters(arguments)}
    own["device"] = arguments.device
    if arguments.shape is None:
        path = arguments.checkpoint
        return EngineSource(str(path), config, **own), path.resolve().name
    shape, scheme, head = arguments.shape, arguments.scheme, arguments.quantize_head
    name, _ = read_shape(shape)
    if arguments.device == "cpu":
        path = random_checkpoint(work, shape, scheme, quantize_head=head)
        return EngineSource(str(path), config, **own), name
    return EngineSource(f"{name}-{scheme}", config, random=(shape, scheme, head), **own), name


def _about(checkpoint: Checkpoint) -> str:
    """How a checkpoint is quantized."""
    scheme, head = checkpoint.scheme, checkpoint.scheme_of(HEAD)
    layers = set(checkpoint.quantized_modules) - {HEAD}
    kinds = Counter(checkpoint.scheme_of(name).text for name in layers).most_common()
    of = [f"{count} layers {text}" for text, count in kinds]
    text = f"{'; '.join(of) if len(of) > 1 else scheme.of_layers.text}; head {head.text}"
    cache = scheme.kv_cache
    return text if cache is None else f"{text}; cache {cache.dtype} {cache.granularity}"


def _about_run(source: EngineSource) -> Iterator[str]:
    """What a checkpoint runs with."""
    drafts = source.config.speculate
    if drafts is not None:
        path = "" if drafts.path is None else f"={drafts.path}"
        yield f"drafts by {drafts.method}{path}, depth {drafts.depth or 'auto'}"
    if source.adapters:
        yield f"adapters {', '.join(source.adapters)}"


@dataclass(frozen=True)
class EngineSource:
    """What engine a process runs.

    Attributes:
        path: Folder of its checkpoint, or what a random model is called.
        quantized_kv: Whether its cache is quantized as the checkpoint says.
        random: Shape, scheme and whether the head is quantized, of a model of random weights that
            is made on the device instead of read; or None.
        fake: Tokens a step and drafts of each request that are to give them (None: as many as
            pay); None: none are faked.
        adapters: Folders of adapters, by name; requests take turns with them.
    """

    path: str
    config: EngineConfig
    quantized_kv: bool = True
    device: str = "cpu"
    random: tuple[str, str, bool] | None = None
    fake: tuple[float, int | None] | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)

    def checkpoint(self) -> Checkpoint:
        """Open the checkpoint, or make the random one."""
        if self.random is None:
            return Checkpoint.open(self.path)
        shape, scheme, head = self.random
        return RandomCheckpoint(shape, scheme, self.device, quantize_head=head)

    def load(self) -> Engine:
        """Load it, and its adapters."""
        own = {"config": self.config, "device": self.device, "quantized_kv": self.quantized_kv}
        if self.random is None:
            engine = Engine.from_pretrained(self.path, **own)
        else:
            engine = random_engine(self.checkpoint, **own)
        for name, folder in self.adapters.items():
            engine.load_adapter(name, folder)
        return engine


class EngineProcess:
    """Runs loads on an engine in a process of its own; a context manager."""

    def __init__(self, source: EngineSource) -> None:
        """Start loading a checkpoint; the first run waits for it."""
        context = multiprocessing.get_context("spawn")  # forking a process with threads hangs
        self.path = source.path
        self._pipe, theirs = context.Pipe()
        arguments = theirs, source, os.getpid()
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def run(self, load: Load) -> Run:
        """`run_once` over there; errors as there, and of loading the checkpoint."""
        try:
            self._pipe.send(load)
            reply = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise EngineError(
                f"{self.path}: the process that ran it died with exit code "
                f"{self._process.exitcode}. If it was killed (-9), memory ran out: lower the batch"
            ) from error
        if isinstance(reply, PTQError):
            raise reply
        return reply


def _serve(pipe: Connection, source: EngineSource, parent: int) -> None:
    """Answer loads until the parent ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends us
    end_with(parent)
    try:
        engine = source.load()
        if source.fake is not None:
            engine.speculate_by(Oracle(TOKEN, chance_of(*source.fake)), source.fake[1])
        while True:
            pipe.send(run_once(engine, pipe.recv()))
    except (EOFError, BrokenPipeError):  # the parent is gone
        return
    except PTQError as error:
        pipe.send(error)
