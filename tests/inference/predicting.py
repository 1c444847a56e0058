"""What the tests of `ptq predict` share: rows written, answered and read."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from inference import predict
from inference.engine import Engine
from inference.requests.request import SamplingParams

SHORT = ["--max-tokens", "6"]


def greedy(engine: Engine, prompt: str) -> str:
    return engine.generate([prompt], SamplingParams(max_tokens=6))[0].text


def write(folder: Path, *lines: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def run(model: Path, source: Path, out: Path, *options: str) -> int:
    return predict.main(
        [str(model), "--input", str(source), "--output", str(out), *SHORT, *options]
    )


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answered(
    model: Path, folder: Path, *rows: dict | str, options: Iterable[str] = (), code: int = 0
) -> list[dict[str, Any]]:
    """Answers to rows or lines, of which none is lost; the command ends with a code."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    source, out = write(folder, *lines), folder / "out.jsonl"
    assert run(model, source, out, *options) == code
    return answers(out)
