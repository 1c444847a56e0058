"""The `ptq` command: hands over to the command asked for, and imports nothing else."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from formats.command import run_command
from formats.errors import RequestError, suggestion
from formats.namespace import load_module, require_own_packages, version

ABOUT = {
    "run": "quantize a model as a recipe says, and report what it cost",
    "quantize": "quantize a model of yours, without a recipe",
    "recipes": "list the recipes that come with ptq, or print one",
    "families": "list the supported families of models, and how each runs",
    "check": "check a recipe against its model and show the plan; changes nothing",
    "explain": "show what a recipe does to each module, step by step",
    "solve": "make another checkpoint from a run's statistics, without the model",
    "diff": "show what differs between two recipes or two checkpoints",
    "compare": "put the reports of several runs into one table and one plot",
    "sweep": "run many recipes on many models, here or on a Ray cluster, into one table",
    "predict": "complete a prompt, or a file of prompts with scores",
    "eval": "run standard tasks on a checkpoint, by lm-eval",
    "certify": "certify a checkpoint against its original: texts, answers, JSON, long contexts",
    "chat": "talk with a model in the terminal",
    "serve": "answer HTTP requests as OpenAI's API does, with a page to try a model on",
    "peers": "measure what other tools make of a recipe's model",
    "report": "measure a finished run again and write its report",
    "bench": "measure speed: requests, or with --steps, --kernels, --tune a GPU's steps and "
    "kernels",
    "inspect": "show a checkpoint's scales, outlier channels and sizes",
    "convert": "write a checkpoint in another layout, or as a float model; read others",
    "completion": "print a script that has bash, zsh or fish complete commands and names",
}
ELSEWHERE = {
    "predict": "inference.predict",
    "chat": "inference.chat",
    "serve": "inference.server.command",
    "bench": "inference.bench.command",
    "completion": "ptq.completion",
}
COMMANDS = {  # module and what it does, by name
    name: (ELSEWHERE.get(name, f"ptq.commands.{name}"), text) for name, text in ABOUT.items()
}
OPTIONS = ("-h", "--help", "-V", "--version")


def usage() -> str:
    """The text of `ptq --help`."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: ptq COMMAND [arguments]\n\n"
        "Post-training quantization of language models, and the runtime for what it makes.\n\n"
        f"commands:\n{rows}\n\n"
        "`ptq COMMAND --help` lists a command's arguments; `ptq --version` the version.\n"
        "Where `ptq` is not on the path, `python -m ptq` stands for it."
    )


def dispatch(argv: Sequence[str] | None) -> int:
    """Run the command that the first argument names, with the others; returns its exit code.

    Raises:
        RequestError: there is no such command.
        EngineError: another project's package stands in the way.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in OPTIONS[:2]:
        print(usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] in OPTIONS[2:]:
        print(f"ptq {version()}")
        return 0
    if arguments[0] not in COMMANDS:
        raise RequestError(
            f"no command {arguments[0]!r}; {suggestion(arguments[0], [*COMMANDS, *OPTIONS])}"
        )
    require_own_packages("calibrate", "inference")
    module = load_module(COMMANDS[arguments[0]][0])
    return module.main(arguments[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the console command `ptq`; errors are printed and give exit code 2."""
    return run_command(dispatch, argv)
