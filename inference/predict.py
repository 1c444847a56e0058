"""`ptq predict`: completes a prompt, or every row of a JSON lines file.

    ptq predict CHECKPOINT --prompt "def add(a, b):" [--stream]
    echo "def add(a, b):" | ptq predict CHECKPOINT --prompt -
    ptq predict CHECKPOINT --input rows.jsonl --output out.jsonl

Rows are objects with a text `src` and, if there is one, a reference `tgt`:

    {"src": "def add(a, b):", "tgt": " return a + b"}

Each comes back in its place as {"src", "tgt", "output"}, `tgt` null where there was none; other
keys stay as they are. The output file appears at once, when all rows are done.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.command import count, run_command
from formats.errors import EngineError, RequestError
from formats.files import replace_file
from formats.later import later
from inference.config import EngineConfig
from inference.scheduling.request import SamplingParams

if TYPE_CHECKING:
    import tqdm

    from inference import engine as engines
    from inference.engine import Engine
else:
    engines = later("inference.engine")
    tqdm = later("tqdm")


@dataclass(frozen=True)
class InputLine:
    """One line of an input file."""

    line: int
    values: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Complete what is asked; 0 on success."""
    arguments = _parse(argv)
    params = _params(arguments)
    rows = [] if arguments.input is None else read_rows(arguments.input)
    config = EngineConfig(
        max_batch_size=arguments.batch_size, max_model_len=arguments.max_model_len
    )
    engine = engines.Engine.from_pretrained(
        arguments.checkpoint, config=config, device=arguments.device
    )
    if arguments.input is not None:
        outputs = complete_rows(engine, rows, params, arguments.input)
        write_rows(arguments.output, rows, outputs)
        print(f"{len(rows)} rows: {arguments.output}")
        return 0
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    complete(engine, prompt, params, stream=arguments.stream)
    return 0


def complete(engine: Engine, prompt: str, params: SamplingParams, *, stream: bool) -> None:
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


def read_rows(path: Path) -> list[InputLine]:
    """Read and check a JSON lines file; empty lines are skipped.

    Raises:
        RequestError: the file cannot be read, or a line is not such a row; names file and line.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: not a readable UTF-8 file ({error})", "input") from error
    rows = [_read_row(path, i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise RequestError(f'{path}: found no rows; one is {{"src": "..."}}', "input")
    return rows


def _read_row(path: Path, line: int, text: str) -> InputLine:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{path}:{line}: not JSON ({error})", "input") from error
    if not isinstance(values, dict):
        raise RequestError(f"{path}:{line}: found {text[:40]!r}, a row is an object", "input")
    if "src" not in values:
        found = ", ".join(map(repr, values)) or "nothing"
        raise RequestError(f"{path}:{line}: no key 'src'; found {found}", "input")
    if not isinstance(values["src"], str) or not values["src"]:
        found = json.dumps(values["src"])[:40]
        raise RequestError(f"{path}:{line}: 'src' is {found}; needed is a text", "input")
    if any("\ud800" <= char <= "\udfff" for char in values["src"]):
        raise RequestError(f"{path}:{line}: 'src' holds half a surrogate pair", "input")
    if not isinstance(values.get("tgt"), str | None):
        found = json.dumps(values["tgt"])[:40]
        raise RequestError(f"{path}:{line}: 'tgt' is {found}; needed is a text or null", "input")
    return InputLine(line, values)


def complete_rows(
    engine: Engine, rows: Sequence[InputLine], params: SamplingParams, source: Path
) -> list[str]:
    """Completions of all rows, in their order; the engine batches them as it has room.

    Raises:
        RequestError: a row's text is too long for the engine; nothing is run.
        EngineError: the model gave NaN or infinity for a row.
    """
    names: list[str] = []
    for row in rows:
        try:
            names.append(engine.add_request(row.values["src"], params))
        except RequestError as error:
            for name in names:
                engine.abort(name)
            raise RequestError(f"{source}:{row.line}: {error}", error.param) from error
    texts: dict[str, str] = {}
    lines = {name: row.line for name, row in zip(names, rows, strict=True)}
    with tqdm.tqdm(total=len(rows), desc="Predicting", unit="row") as bar:
        while engine.has_unfinished:
            for output in engine.step():
                if output.finish_reason == "error":
                    line = lines[output.request_id]
                    raise EngineError(f"{source}:{line}: the completion failed: {output.error}")
                if output.finished:
                    texts[output.request_id] = output.text
                    bar.update()
    return [texts[name] for name in names]


def write_rows(path: Path, rows: Sequence[InputLine], outputs: Sequence[str]) -> None:
    """Write the rows with their outputs: the whole file or nothing.

    Raises:
        CheckpointError: it cannot be written.
    """
    lines = []
    for row, output in zip(rows, outputs, strict=True):
        others = {k: v for k, v in row.values.items() if k not in ("src", "tgt", "output")}
        answer = {"src": row.values["src"], "tgt": row.values.get("tgt"), "output": output}
        lines.append(json.dumps(answer | others, ensure_ascii=False) + "\n")
    text = "".join(lines)  # half a surrogate pair, which UTF-8 cannot hold, stays a JSON escape
    replace_file(path, text.encode("utf-8", "backslashreplace"))


def _params(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
    )


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq predict`."""
    made = argparse.ArgumentParser(
        prog="ptq predict",
        description="Complete a prompt, or every row of a JSON lines file.",
        epilog='Rows are {"src": text, "tgt": text or null} and come back with an "output"; an '
        "existing output file is replaced when all rows are done.",
    )
    made.add_argument("checkpoint", type=Path, help="folder of a quantized or float model")
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="what to complete; - reads it from stdin")
    source.add_argument("--input", type=Path, metavar="ROWS.jsonl")
    made.add_argument("--output", type=Path, metavar="OUT.jsonl", help="needed with --input")
    made.add_argument("--max-tokens", type=int, default=128, metavar="N")
    made.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default 0: the likeliest token"
    )
    made.add_argument("--top-k", type=int, default=0, metavar="K", help="default 0: all tokens")
    made.add_argument("--top-p", type=float, default=1.0, metavar="P")
    made.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    made.add_argument("--seed", type=int, metavar="N", help="of each prompt's random numbers")
    made.add_argument("--stop", action="append", default=[], metavar="TEXT", help="repeatable")
    made.add_argument("--stream", action="store_true", help="print text as it comes")
    made.add_argument("--device", default="cpu", help="cpu (the default), cuda or cuda:N")
    made.add_argument("--batch-size", type=count, default=16, metavar="N", help="rows at once")
    made.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="most tokens of prompt and completion; default: what the model allows, up to 4096",
    )
    return made


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = (own := parser()).parse_args(argv)
    if (arguments.input is None) != (arguments.output is None):
        own.error("--input and --output belong together")
    if arguments.input is not None and arguments.stream:
        own.error("--stream goes with --prompt; the rows of --input are written at the end")
    if arguments.max_model_len is not None and arguments.max_model_len < 2:
        own.error("--max-model-len must be at least 2")
    return arguments


if __name__ == "__main__":
    raise SystemExit(run_command(main))
