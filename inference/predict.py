"""`ptq predict`: completes a prompt, or every row of a JSON lines file.

    ptq predict CHECKPOINT --prompt "def add(a, b):" [--stream]
    ptq predict CHECKPOINT --prompt "def add(a, b):" --beam-width 4
    echo "def add(a, b):" | ptq predict CHECKPOINT --prompt -
    ptq predict CHECKPOINT --input rows.jsonl --output out.jsonl

Where the model has a chat template, a prompt goes through it as a user's message, after a system
message if there is one; `--raw` leaves it off.

Rows are objects with a text `src` or a chat `messages` and, if there is one, a reference `tgt`:

    {"src": "def add(a, b):", "tgt": " return a + b"}
    {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "tgt": "4"}

and, if there is one, a text `reference` that the output is expected to repeat in parts:
`--speculate ngram` drafts from it. A row's `"adapter"` is a name of those of
`--adapter NAME=FOLDER`, or null for none; missing, it is the only one, or none of several.

Each comes back in its place with its `output`, and with a target

- `exact_match`: whether output and target are equal, white space around either aside;
- `logprob`: natural logarithm of the target's probability (see `inference.rows`), a sum over
- `tgt_tokens` tokens.

A row that cannot be completed has `"output": null` and an `error`; the others are done, and the
exit code is 1. Other keys stay as they are. The output file appears at once, when all rows are
done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from formats.command import CommandParser, count, run_command
from formats.errors import EngineError, RequestError
from formats.gguf.locate import locate_model
from formats.namespace import later
from inference.arguments import (
    add_adapter_argument,
    add_beam_arguments,
    add_content_argument,
    add_engine_arguments,
    add_sampling_arguments,
    beam_params,
    open_engine,
    read_adapters,
    sampling_params,
)
from inference.beam_search import BeamParams, beam_search
from inference.prompts import PromptFormat
from inference.requests.request import SamplingParams
from inference.rows import (
    Row,
    answer_rows,
    failures,
    read_rows,
    require_writable,
    summary,
    write_rows,
)

if TYPE_CHECKING:
    from inference.engine import Engine
with later():
    from inference.speculate import counts

OF_BEAMS = ("length_penalty", "early_stopping")
OF_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty", "seed", "stop", "stream")


def main(argv: Sequence[str] | None = None) -> int:
    """Complete what is asked; 0 on success, 1 where a row failed."""
    arguments = _parse(argv)
    params = beam_params(arguments) or sampling_params(arguments)
    rows = [] if arguments.input is None else read_rows(arguments.input)
    prompt = _read_stdin() if arguments.prompt == "-" else arguments.prompt
    if arguments.output is not None:
        require_writable(arguments.output)
    folder = locate_model(arguments.checkpoint, arguments.revision, progress=not arguments.quiet)
    places = max(arguments.batch_size, arguments.beam_width or 1)
    engine = open_engine(folder, arguments, places, read_adapters(arguments))
    prompts = PromptFormat.of(
        engine.tokenizer,
        raw=arguments.raw,
        system=arguments.system,
        special_tokens_in_content=arguments.special_tokens_in_content,
    )
    if not arguments.quiet:
        print(f"note: {prompts.note}", file=sys.stderr)
    if prompt is None:
        return _complete_rows(engine, rows, prompts, params, arguments)
    if isinstance(params, BeamParams):
        print(beam_search(engine, [prompts.tokens(prompt)], params)[0][0].text(engine.tokenizer))
        return 0
    complete(engine, prompts.tokens(prompt), params, stream=arguments.stream)
    if (drafts := _drafts(engine)) and not arguments.quiet:
        print(f"note: {drafts}", file=sys.stderr)
    return 0


def _complete_rows(
    engine: Engine,
    rows: list[Row],
    prompts: PromptFormat,
    params: SamplingParams | BeamParams,
    arguments: argparse.Namespace,
) -> int:
    answers = answer_rows(engine, rows, prompts, params, progress=not arguments.quiet)
    write_rows(arguments.output, rows, answers)
    failed = failures(arguments.input, rows, answers)
    for line in failed:
        print(line, file=sys.stderr)
    drafts = _drafts(engine)
    print(f"{summary(rows, answers)}{drafts and '; '}{drafts}: {arguments.output}")
    return 1 if failed else 0


def _drafts(engine: Engine) -> str:
    """What became of drafts; empty where there are none."""
    speculation = engine.speculation
    return "" if speculation is None else counts.DraftCounts.of(speculation).text()


def complete(
    engine: Engine, prompt: str | Sequence[int], params: SamplingParams, *, stream: bool
) -> None:
    """Print the completion of one prompt: at its end, or with `stream` as it comes.

    Raises:
        RequestError: the prompt is empty or too long.
        EngineError: the model gave NaN or infinity.
    """
    output = None
    for output in engine.stream(prompt, params):
        if output.finish_reason == "error":
            raise EngineError(f"the completion failed: {output.error}")
        if stream:
            print(output.delta, end="", flush=True)
    print("" if stream or output is None else output.text)


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"prompt: standard input is no UTF-8 ({error})", "prompt") from error


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq predict`."""
    made = CommandParser(
        prog="ptq predict",
        description="Complete a prompt, or every row of a JSON lines file. Where the model has a "
        "chat template, a prompt goes through it as a user's message.",
        epilog='Rows are {"src": TEXT} or {"messages": [{"role": "user", "content": TEXT}]}, with '
        '"tgt": TEXT where there is a reference. They come back in their places with an "output", '
        'and for a reference with "exact_match" (white space around either aside), "logprob" (of '
        'the reference, natural, a sum) and "tgt_tokens". A row that cannot be completed has '
        '"output": null and an "error"; the others are done. An existing output file is replaced '
        "when all rows are done. Exit code: 0, or 1 where a row failed, or 2 where nothing was "
        "written.",
    )
    add_engine_arguments(made)
    add_adapter_argument(
        made,
        'Prompts run with the only one; a row of --input may name another by its key "adapter", or '
        "none by null",
    )
    source = made.add_mutually_exclusive_group(required=True)
    text = "what to complete; - reads it from stdin"
    source.add_argument("--prompt", action="append", metavar="TEXT", help=text)
    source.add_argument("--input", type=Path, metavar="ROWS.jsonl", help="rows to complete")
    made.add_argument("--output", type=Path, metavar="OUT.jsonl", help="needed with --input")
    made.add_argument("--system", metavar="TEXT", help="system message, for the chat template")
    made.add_argument("--raw", action="store_true", help="leave the chat template off")
    add_content_argument(made)
    add_sampling_arguments(made, max_tokens=128)
    add_beam_arguments(made)
    made.add_argument("--stream", action="store_true", help="print text as it comes")
    made.add_argument("--batch-size", type=count, default=16, metavar="N", help="rows at once")
    made.add_argument("--quiet", action="store_true", help="show no progress, only the result")
    return made


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = (own := parser()).parse_args(argv)
    if (arguments.input is None) != (arguments.output is None):
        own.error("--input and --output belong together")
    if arguments.input is not None and arguments.stream:
        own.error("--stream goes with --prompt; the rows of --input are written at the end")
    if arguments.prompt is not None:
        if (given := len(arguments.prompt)) > 1:
            own.error(f"found {given} of --prompt; give one, or --input with a file of rows")
        if len(arguments.adapter) > 1:
            own.error("--prompt runs with one --adapter; give one, or rows that name them")
        arguments.prompt = arguments.prompt[0]
    others, fault = OF_BEAMS, "needs --beam-width"
    if arguments.beam_width is not None:
        others, fault = OF_SAMPLING, "has no place in a beam search"
    for name in others:
        if getattr(arguments, name) != own.get_default(name):
            own.error(f"--{name.replace('_', '-')} {fault}")
    if arguments.raw and arguments.system is not None:
        own.error("--system goes through the chat template, which --raw leaves off; give one")
    return arguments


if __name__ == "__main__":
    raise SystemExit(run_command(main))
