"""`ptq bench`: where speed is measured. Without a mode, whole requests of a checkpoint:

    ptq bench CHECKPOINT [--against ORIGINAL] [--batch 1 4 16] [--prompt 128] [--new 64]
    ptq bench CHECKPOINT --device cuda
    ptq bench --shape llama-1.1b --scheme a8w4 --quantize-head --work DIR \
        --peer llama.cpp=envs/llama/bin/python --peer transformers

`--steps`, `--kernels` and `--tune` are modes with arguments of their own. Arguments are read before
anything heavy is imported.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from formats.command import CommandParser, count, device
from formats.errors import EngineError
from formats.files import replace_file
from formats.gguf.locate import is_gguf, locate_model
from formats.hub import model_argument
from inference.arguments import (
    add_adapter_argument,
    add_invariant_argument,
    add_parallel_argument,
    add_speculate_arguments,
)
from inference.bench.peers.runtimes import RUNTIMES
from inference.bench.shapes import SHAPES, read_scheme, read_shape

AS_WRITTEN = argparse.RawDescriptionHelpFormatter
TASKS = ("editing", "repeated")
SCHEMES = ("a8w8c8", "fp8_c8", "w4c8", "a8w4c8_two_level", "float")  # of `--steps`
MODES = {
    "--steps": (
        "inference.bench.command:measure_steps",
        "steps of models of random weights on a GPU: a table of tokens/s by scheme",
    ),
    "--kernels": (
        "kernels.bench.command:kernels",
        "single kernels beside their floor and what torch has, on a GPU or a CPU",
    ),
    "--tune": ("kernels.bench.command:tune", "tiles of GPU kernels: writes the device's table"),
}
REQUESTS = """\
Measure tokens per second, latencies and memory of whole requests, at fixed lengths: models
take turns (A B A B ...), each in a process of its own."""
ABOUT_FIGURES = """\
Every request has as many prompt tokens, drawn at random, and generates as many new ones: end tokens
are ignored. Tokens/s are medians of the repeated runs, with the least and greatest in brackets;
latencies are percentiles over all requests; ratios are those of single turns."""
ABOUT_JSON = (
    "write the figures here too: `results`, a row for each load and model (of drafts, `drafts`: "
    "steps with any, those proposed and accepted by position, tokens a step), `ratios`, `notes`, "
    "`environment`"
)
ABOUT_ACCEPTANCE = (
    "fake drafts, --depth of them, so that a request gains so many tokens a step: what speculation "
    "would bring a model whose weights are random here. With --depth auto as many are right as "
    "give so many tokens at a depth of 4"
)
ABOUT_TASKS = (
    "instead of random prompts, text where --speculate pays, with and without drafts in turns. "
    "editing: functions of Python's standard library, each to be written again with a variable "
    "renamed; outputs are forced, by making the logit of the edited text's next token the "
    "largest, with drafts and without, as models this small make no such edit (on a CPU). "
    "repeated: the model continues first halves of such functions by --new tokens, and each run "
    "asks for the same again. --prompt says nothing of either"
)
EDITS_WITH_SUFFIX = (
    "--task editing has the same edits in every run, which suffix would know from the run before: "
    "it is for drafts from a request's own text; give --task repeated"
)
STEPS = """\
Steps of a model of random weights on a GPU, one by one.

    ptq bench --steps --schemes a8w8c8 w4c8 float --batch 1 16 64 --json steps.json

For every scheme and batch: the median step with a cache that holds --context tokens of each
sequence, and the share of a large copy's bandwidth at which it reads weights and cache; the same
step's CUDA graph alone; what the host does in a step that is not waiting; then a prefill of 8
prompts of 1024 tokens, the first token of one prompt of 128, and the peak of the GPU's memory. A
scheme that does not fit is told, and the others are measured. Whole requests are measured by `ptq
bench --shape llama-3-8b --scheme a8w8c8 --device cuda`. With --host only what the host does is
measured, with a device that gives fixed tokens at once: without a GPU, of no shape or scheme.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in the mode that is asked for, and print; 0 on success."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    mode = next((text for text in arguments if text in MODES), None)
    if mode is not None:
        arguments.remove(mode)
        module, _, name = MODES[mode][0].partition(":")
        return getattr(importlib.import_module(module), name)(arguments)
    parsed = parse(arguments)
    from inference.bench.requests import measure_requests

    return measure_requests(parsed)


def parser() -> argparse.ArgumentParser:
    """The arguments of the mode without a name."""
    made = CommandParser(
        prog="ptq bench", formatter_class=AS_WRITTEN, description=REQUESTS, epilog=ABOUT_FIGURES
    )
    add = made.add_argument
    about = "folder of a quantized or float model, or a .gguf file"
    add("checkpoint", type=model_argument, nargs="?", help=about)
    add("--against", type=model_argument, metavar="ORIGINAL", help="compare with this model")
    kinds, cache = ["float32", "bfloat16"], "compare with the same model and a cache of this type"
    add("--against-kv", choices=kinds, action="append", default=[], help=cache)
    code = "compare with the same model run by transformers' own code"
    add("--against-transformers-code", action="store_true", help=code)
    add("--device", type=device, default="cpu", help="cpu (the default), cuda or cuda:N")
    add("--batch", type=count, nargs="+", default=[1, 4, 16], metavar="N")
    add("--prompt", type=count, default=128, metavar="TOKENS")
    add("--new", type=count, default=64, metavar="TOKENS", help="at least 2")
    add("--warmup", type=count, default=1, metavar="RUNS")
    add("--repeats", type=count, default=3, metavar="RUNS")
    add("--json", type=Path, metavar="FILE", help=ABOUT_JSON)
    add_invariant_argument(made)
    add_parallel_argument(made)
    add_speculate_arguments(made)
    add_adapter_argument(made, "Requests take turns with them, beside the same without any")
    add("--acceptance", type=float, metavar="TOKENS", help=ABOUT_ACCEPTANCE)
    add("--task", choices=TASKS, help=ABOUT_TASKS)
    modes = made.add_argument_group("other modes, each with arguments and a --help of its own")
    for mode, (_, text) in MODES.items():
        modes.add_argument(mode, action="store_true", help=text)
    add = made.add_argument_group("random weights instead of a checkpoint").add_argument
    add("--shape", help=f"{', '.join(SHAPES)}, or a config.json or a folder that holds one")
    add("--scheme", help="a preset of recipes, such as a8w4, or float for bf16")
    add("--quantize-head", action="store_true", help="int8 head, inputs per token")
    kept = "keep what is made there; default: nothing is kept"
    add("--work", type=Path, metavar="DIR", help=kept)
    others = made.add_argument_group("other runtimes, on random weights of the same shape")
    add, peers = others.add_argument, RUNTIMES.values()
    names = f"{', '.join(RUNTIMES)}; PYTHON is the interpreter of an environment that has it"
    add("--peer", action="append", default=[], metavar="NAME[=PYTHON]", help=names)
    formats = f"their weights: {', '.join(name for peer in peers for name in peer.formats)}"
    add("--peer-format", nargs="+", default=[], metavar="FORMAT", help=formats)
    caches = ", ".join(dict.fromkeys(name for peer in peers for name in peer.caches))
    add("--peer-kv", nargs="+", default=[], metavar="TYPE", help=f"their cache: {caches}")
    return made


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of the mode without a name that fit each other."""
    arguments = (own := parser()).parse_args(argv)
    for wrong, message in _rules(arguments):
        if wrong:
            own.error(message)
    for name in ("checkpoint", "against"):
        model = getattr(arguments, name)
        if model is not None:
            folder = locate_model(model)
            if is_gguf(model):
                setattr(arguments, name, folder)
    if arguments.shape is not None:
        read_shape(arguments.shape)
        read_scheme(arguments.scheme)
    return arguments


def _rules(own: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    """What does not fit, and what to say of it."""
    shape, task, edits = own.shape is not None, own.task is not None, own.task == "editing"
    yield own.new < 2, "--new must be at least 2: one token has no time between tokens"
    one = "give the folder of a checkpoint, or --shape for one of random weights"
    yield shape == (own.checkpoint is not None), one
    yield shape != (own.scheme is not None), "--shape and --scheme go together"
    head = "--quantize-head is for --shape: a checkpoint has the head that it has"
    yield own.quantize_head and not shape, head
    yield task and shape, "--task needs a checkpoint: random weights have no text"
    yield task and own.speculate is None, "--task shows what --speculate gives: give it, too"
    yield edits and (own.speculate or "?")[0] == "suffix", EDITS_WITH_SUFFIX
    beside = "--task has tokens of one checkpoint: leave --against and --peer out"
    yield task and (own.against is not None or bool(own.peer)), beside
    host = "--task editing forces outputs on the host: leave --device out"
    yield edits and own.device != "cpu", host
    adapters = "--adapter is measured beside the same without: leave --task and --peer out"
    yield bool(own.adapter) and (task or bool(own.peer)), adapters


def steps_parser() -> argparse.ArgumentParser:
    """The arguments of `ptq bench --steps`."""
    made = CommandParser(prog="ptq bench --steps", description=STEPS, formatter_class=AS_WRITTEN)
    add = made.add_argument
    add("--shape", default="llama-3-8b", help=f"{', '.join(SHAPES)}, or the path of a config.json")
    add("--schemes", nargs="+", default=SCHEMES, help="presets of recipes, or float for bf16")
    heads = "measure each scheme with each of these for lm_head, such as float w8"
    add("--heads", nargs="+", default=[], metavar="SCHEME", help=heads)
    add("--batch", type=count, nargs="+", default=[1, 16, 64], metavar="N")
    add("--context", type=count, default=4048, metavar="TOKENS")
    ranks = "cut the model among N GPUs, whose first one is told of"
    add("--tensor-parallel", type=count, default=1, metavar="N", help=ranks)
    add("--host", action="store_true", help="the host alone, without a GPU")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    return made


def measure_steps(argv: Sequence[str] | None = None) -> int:
    """`ptq bench --steps`: scheme by scheme, all in one process; 1 where one did not fit."""
    arguments = steps_parser().parse_args(argv)
    if arguments.host:
        from inference.bench.steps import measure_host
        from kernels.devices import check_triton

        try:
            check_triton()
        except ValueError as error:
            raise EngineError(f"--host plans steps as for a GPU, and {error}") from error
        for batch in arguments.batch:
            us = measure_host(batch, arguments.context)
            text = f"{us:6.0f} us a step, {us / batch:.2f} us a sequence"
            print(f"host alone, batch {batch:3}: {text}", flush=True)
        return 0
    read_shape(arguments.shape)
    for scheme in (*arguments.schemes, *arguments.heads):
        read_scheme(scheme)
    import torch

    from inference.backend import require_device
    from inference.bench import steps

    require_device("cuda")
    print(device_name := torch.cuda.get_device_name(), flush=True)
    found: list[steps.Figures] = []
    missing: dict[str, str] = {}
    sizes = arguments.batch, arguments.context
    for scheme, head in product(dict.fromkeys(arguments.schemes), arguments.heads or [None]):
        try:
            ranks = arguments.tensor_parallel
            found.append(steps.measure(arguments.shape, scheme, *sizes, head, ranks))
        except EngineError as error:
            name = scheme if head is None else f"{scheme}, head {head}"
            missing[name] = str(error)
            print(f"{name}: {error}", flush=True)
        else:
            print("\n".join(steps.describe(found[-1])), flush=True)
    print(f"\n{steps.table(found, arguments.context)}")
    if arguments.json is not None:
        text = steps.to_json(device_name, arguments.shape, arguments.context, found, missing)
        replace_file(arguments.json, text.encode())
    return 1 if missing else 0
