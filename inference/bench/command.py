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
from collections.abc import Sequence
from pathlib import Path

from formats.command import CommandParser, count, device
from formats.gguf.locate import locate_model
from inference.arguments import (
    add_adapter_argument,
    add_invariant_argument,
    add_parallel_argument,
    add_speculate_arguments,
)
from inference.bench.peers.runtimes import RUNTIMES
from inference.bench.shapes import SHAPES, read_scheme, read_shape

TASKS = ("editing", "repeated")
MODES = {
    "--steps": (
        "inference.bench.steps_command:main",
        "steps of models of random weights on a GPU: a table of tokens/s by scheme",
    ),
    "--kernels": (
        "kernels.bench.command:kernels",
        "single kernels beside their floor and what torch has, on a GPU or a CPU",
    ),
    "--tune": (
        "kernels.bench.command:tune",
        "tiles of GPU kernels: writes the device's table",
    ),
}


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
        prog="ptq bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measure tokens per second, latencies and memory of whole requests, at fixed "
        "lengths: models\ntake turns (A B A B ...), each in a process of its own.",
        epilog="Every request has as many prompt tokens, drawn at random, and generates as many "
        "new ones: end tokens\nare ignored. Tokens/s are medians of the repeated runs, with the "
        "least and greatest in brackets;\nlatencies are percentiles over all requests; ratios are "
        "those of single turns.",
    )
    made.add_argument(
        "checkpoint", type=Path, nargs="?", help="folder of a quantized or float model"
    )
    made.add_argument("--against", type=Path, metavar="ORIGINAL", help="compare with this model")
    made.add_argument(
        "--against-kv",
        choices=["float32", "bfloat16"],
        action="append",
        default=[],
        help="compare with the same model and a cache of this type",
    )
    made.add_argument(
        "--against-transformers-code",
        action="store_true",
        help="compare with the same model run by transformers' own code",
    )
    made.add_argument(
        "--device", type=device, default="cpu", help="cpu (the default), cuda or cuda:N"
    )
    made.add_argument("--batch", type=count, nargs="+", default=[1, 4, 16], metavar="N")
    made.add_argument("--prompt", type=count, default=128, metavar="TOKENS")
    made.add_argument("--new", type=count, default=64, metavar="TOKENS", help="at least 2")
    made.add_argument("--warmup", type=count, default=1, metavar="RUNS")
    made.add_argument("--repeats", type=count, default=3, metavar="RUNS")
    made.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the figures here too: `results`, a row for each load and model "
        "(of drafts, `drafts`: steps with any, those proposed and accepted by position, tokens a "
        "step), `ratios`, `notes`, `environment`",
    )
    add_invariant_argument(made)
    add_parallel_argument(made)
    add_speculate_arguments(made)
    add_adapter_argument(made, "Requests take turns with them, beside the same without any")
    made.add_argument(
        "--acceptance",
        type=float,
        metavar="TOKENS",
        help="fake drafts, --depth of them, so that a request gains so many tokens a step: what "
        "speculation would bring a model whose weights are random here. With --depth auto as many "
        "are right as give so many tokens at a depth of 4",
    )
    made.add_argument(
        "--task",
        choices=TASKS,
        help="instead of random prompts, text where --speculate pays, with and without drafts in "
        "turns. editing: functions of Python's standard library, each to be written again with a "
        "variable renamed; outputs are forced, by making the logit of the edited text's next token "
        "the largest, with drafts and without, as models this small make no such edit (on a CPU). "
        "repeated: the model continues first halves of such functions by --new tokens, and each "
        "run asks for the same again. --prompt says nothing of either",
    )
    modes = made.add_argument_group("other modes, each with arguments and a --help of its own")
    for mode, (_, text) in MODES.items():
        modes.add_argument(mode, action="store_true", help=text)
    _add_shape_arguments(made)
    _add_peer_arguments(made)
    return made


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of the mode without a name that fit each other."""
    arguments = (own := parser()).parse_args(argv)
    if arguments.new < 2:
        own.error("--new must be at least 2: one token has no time between tokens")
    if (arguments.checkpoint is None) == (arguments.shape is None):
        own.error("give the folder of a checkpoint, or --shape for one of random weights")
    if (arguments.shape is None) != (arguments.scheme is None):
        own.error("--shape and --scheme go together")
    if arguments.quantize_head and arguments.shape is None:
        own.error("--quantize-head is for --shape: a checkpoint has the head that it has")
    if arguments.task is not None:
        _check_task(own, arguments)
    if arguments.adapter and (arguments.task is not None or arguments.peer):
        own.error("--adapter is measured beside the same without: leave --task and --peer out")
    for model in (arguments.checkpoint, arguments.against):
        if model is not None:
            locate_model(model)
    if arguments.shape is not None:
        read_shape(arguments.shape)
        read_scheme(arguments.scheme)
    return arguments


def _check_task(own: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """A task measures one checkpoint, with drafts and without."""
    if arguments.checkpoint is None:
        own.error("--task needs a checkpoint: random weights have no text")
    if arguments.speculate is None:
        own.error("--task shows what --speculate gives: give it, too")
    if arguments.task == "editing" and arguments.speculate[0] == "suffix":
        own.error(
            "--task editing has the same edits in every run, which suffix would know from the run "
            "before: it is for drafts from a request's own text; give --task repeated"
        )
    if arguments.against is not None or arguments.peer:
        own.error("--task has tokens of one checkpoint: leave --against and --peer out")
    if arguments.task == "editing" and arguments.device != "cpu":
        own.error("--task editing forces outputs on the host: leave --device out")


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
        help=f"{', '.join(RUNTIMES)}; PYTHON is the interpreter of an environment that has it",
    )
    formats = ", ".join(name for peer in RUNTIMES.values() for name in peer.formats)
    caches = ", ".join(dict.fromkeys(name for peer in RUNTIMES.values() for name in peer.caches))
    group.add_argument(
        "--peer-format", nargs="+", default=[], metavar="FORMAT", help=f"their weights: {formats}"
    )
    group.add_argument(
        "--peer-kv", nargs="+", default=[], metavar="TYPE", help=f"their cache: {caches}"
    )
