"""Whole requests of checkpoints and of other runtimes, in turns: `ptq bench` without a mode."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from formats.checkpoint.read import Checkpoint
from formats.command import bar
from formats.errors import RequestError
from formats.families.names import HEAD
from formats.files import replace_file
from inference.arguments import read_adapters, speculate_config
from inference.backend import require_device
from inference.bench.engine_process import EngineProcess, EngineSource
from inference.bench.figures import (
    Ratio,
    Runner,
    Speed,
    compare_turns,
    describe,
    drafts_of,
    run_in_turns,
    summarize,
    to_json,
)
from inference.bench.load import Load
from inference.bench.oracle import TOKEN, chance_of
from inference.bench.peers.process import RuntimeProcess
from inference.bench.peers.runtimes import read_choices
from inference.bench.random_checkpoint import random_checkpoint
from inference.bench.shapes import read_shape
from inference.bench.tasks import make_task
from inference.config import EngineConfig, SpeculateConfig
from inference.scheduling.blocks import blocks_for

FAKED = (
    "drafts are faked: what making them takes is in no figure, and one token is all that comes, by "
    "a bias, without drafts too"
)


class MeasuredModel(NamedTuple):
    """Something that runs loads: what it is called, what it is, and how it is run."""

    name: str
    note: str
    run: Runner


def measure_requests(arguments: argparse.Namespace) -> int:
    """Measure what `inference.bench.command.parse` read, and print; 0 on success."""
    results: list[list[tuple[str, Speed]]] = []  # by batch, then by model
    ratios: list[Ratio] = []
    drafts: list[str] = []
    first = _load(arguments)
    with ExitStack() as stack:
        models = _start_models(stack, arguments, first)
        for batch in bar(sorted(set(arguments.batch)), title="Measuring", unit="batch"):
            load = first.model_copy(update={"batch": batch})
            runners = [model.run for model in models]
            runs = run_in_turns(runners, load, arguments.warmup, arguments.repeats)
            named = [(model.name, own) for model, own in zip(models, runs, strict=True)]
            results.append([(name, summarize(load, own)) for name, own in named])
            ratios += [compare_turns(load, named[-1], other) for other in named[:-1]]
            if arguments.speculate is not None or arguments.acceptance is not None:
                drafts.append(f"batch {batch}: {named[-1][0]}: {drafts_of(named[-1][1]).text()}")
    notes = [model.note for model in models]
    if arguments.acceptance is not None:
        notes.append(FAKED)
    if first.task is not None:
        notes.append(first.task.note)
    print("\n".join([*describe(results, ratios, notes, arguments.device), *drafts]))
    if arguments.json is not None:
        replace_file(arguments.json, to_json(results, ratios, notes, arguments.device).encode())
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
    path, shape = _place(arguments, work)
    config = _engine_config(arguments, load)
    fake, adapters = _faked(arguments), read_adapters(arguments)
    sources = [replace(_source(arguments, path, config), fake=fake, adapters=adapters)]
    if arguments.against is not None:
        original = replace(sources[0], path=str(arguments.against), random=None, fake=None)
        sources.insert(0, original)
    checkpoints = [source.checkpoint() for source in sources]
    ours = checkpoints[-1]
    specs = read_choices(arguments.peer, arguments.peer_format, arguments.peer_kv, ours.scheme)
    for spec in specs:
        spec.check_installed()
    peers = [RuntimeProcess(spec, ours.config, shape, work) for spec in specs]
    peers = [stack.enter_context(peer) for peer in peers]
    engines = [stack.enter_context(EngineProcess(source)) for source in sources]
    names = [source.path for source in sources]
    if arguments.shape is not None:
        names[-1] = Path(names[-1]).name
    rows = zip(names, checkpoints, engines, strict=True)
    models = [MeasuredModel(n, f"{n}: {_about(found)}", worker.run) for n, found, worker in rows]
    for name, source in _variants(arguments, sources[-1]):
        worker = stack.enter_context(EngineProcess(source))
        name = f"{names[-1]}, {name}"
        models.insert(-1, MeasuredModel(name, f"{name}: the same weights", worker.run))
    if (drafts := sources[-1].config.speculate) is not None:
        models[-1] = models[-1]._replace(note=f"{models[-1].note}; {_about_drafts(drafts)}")
    if adapters:
        models[-1] = models[-1]._replace(note=f"{models[-1].note}; adapters {', '.join(adapters)}")
    return [*models[:-1], *(MeasuredModel(p.name, p.note, p.run) for p in peers), models[-1]]


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
    if config.speculate is not None or source.fake is not None:
        kept = config.model_copy(update={"speculate": None})
        yield "no drafts", replace(source, config=kept, fake=None)
    if source.adapters:
        yield "no adapters", replace(source, adapters={})
    if config.invariant:
        kept = config.model_copy(update={"invariant": False})
        yield "not invariant", replace(source, config=kept)
    if config.tensor_parallel > 1:
        yield "one rank", replace(source, config=config.model_copy(update={"tensor_parallel": 1}))
    for kind in arguments.against_kv:
        kept = config.model_copy(update={"kv_dtype": kind})
        yield f"{kind} cache", replace(source, config=kept, quantized_kv=False)
    if arguments.against_transformers_code:
        kept = config.model_copy(update={"transformers_code": True})
        yield "transformers' code", replace(source, config=kept)


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


def _about_drafts(config: SpeculateConfig) -> str:
    path = "" if config.path is None else f"={config.path}"
    return f"drafts by {config.method}{path}, depth {config.depth or 'auto'}"


def _engine_config(arguments: argparse.Namespace, load: Load) -> EngineConfig:
    longest = load.prompt_tokens + load.new_tokens
    return EngineConfig(
        max_batch_size=max(arguments.batch),
        max_model_len=longest,
        kv_blocks=max(arguments.batch) * blocks_for(longest),
        prefix_cache=False,  # each run of a load is to compute its prompts
        invariant=arguments.invariant,
        tensor_parallel=arguments.tensor_parallel,
        speculate=None if arguments.acceptance is not None else speculate_config(arguments),
    )
