"""Files of rows for `ptq predict`: read, completed, scored and written, each row in its place.

A row that cannot be read or answered costs that row alone: it gets an `error`, the others are done.

Targets are scored by teacher forcing. Of a prompt with token ids p_1 .. p_n, as it is completed,
and a target of ids t_1 .. t_m, which is encoded on its own and without special tokens,

    logprob = sum_j ln P(t_j | p_1 .. p_n, t_1 .. t_j-1)

by the model's own distribution, before temperature and penalties. A tokenizer that would merge the
last characters of the prompt with the first ones of the target is not given the chance to: the
prompt's tokens are the same with and without a target. No end token is part of a target.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from formats.chat_template import read_messages
from formats.command import bar
from formats.errors import RequestError
from formats.files import replace_file, writing
from inference.beam_search import BeamParams, BeamSearch
from inference.prompts import PromptFormat
from inference.requests.request import RequestOutput, SamplingParams, StepResult

if TYPE_CHECKING:
    from inference.engine import Engine

PROMPTS = ("src", "messages")
RESULTS = ("output", "exact_match", "logprob", "tgt_tokens", "error")  # those of an earlier run go
ROW = '{"src": "..."}'  # for messages
TOLD = 5  # failed rows that are named on the terminal


@dataclass(frozen=True)
class Row:
    """One line of an input file.

    Attributes:
        line: Its number, from 1 on.
        values: What it holds; nothing where it is no object.
        error: Why it cannot be completed, if it cannot.
    """

    line: int
    values: dict[str, Any]
    error: str | None = None

    @property
    def target(self) -> str | None:
        """The reference, if the row has one."""
        return self.values.get("tgt")


@dataclass
class Answer:
    """What became of a row.

    Attributes:
        output: The completion; None where it failed.
        logprob: Natural logarithm of the target's probability; see the module's docstring.
        tgt_tokens: Tokens of the target.
        error: What failed, if anything did.
    """

    output: str | None = None
    logprob: float | None = None
    tgt_tokens: int | None = None
    error: str | None = None


def read_rows(path: Path) -> list[Row]:
    """Read and check a JSON lines file; empty lines are skipped.

    Raises:
        RequestError: the file cannot be read, or not one of its lines is such a row.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{path}: not a readable UTF-8 file ({error}); needed are JSON lines, {ROW} each",
            "input",
        ) from error
    rows = [_read_row(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise RequestError(f"{path}: found no rows; one is {ROW}", "input")
    if all(row.error for row in rows):
        first = rows[0]
        raise RequestError(f"{path}:{first.line}: {first.error}; so it is with all rows", "input")
    return rows


def _read_row(line: int, text: str) -> Row:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Row(line, {}, f"line {line} is not JSON ({error})")
    if not isinstance(values, dict):
        return Row(line, {}, f"line {line} is {text[:40]!r}; a row is an object")
    return Row(line, values, _fault(values))


def _fault(values: dict[str, Any]) -> str | None:
    """Why a row cannot be completed, if it cannot."""
    prompts = [key for key in PROMPTS if key in values]
    if len(prompts) != 1:
        found = ", ".join(map(repr, values)) or "nothing"
        return f"a row has one of the keys 'src' and 'messages'; found {found}"
    for key in ("tgt", "reference", "adapter"):
        if not isinstance(values.get(key), str | None):
            return f"{key!r} is {json.dumps(values[key])[:40]}; needed is a text or null"
    for key in ("src", "tgt", "reference"):
        if any("\ud800" <= char <= "\udfff" for char in str(values.get(key))):
            return f"{key!r} holds half a surrogate pair, which is no text"
    if prompts == ["messages"]:
        return _fault_of_messages(values["messages"])
    if not isinstance(values["src"], str) or not values["src"]:
        return f"'src' is {json.dumps(values['src'])[:40]}; needed is a text"
    return None


def _fault_of_messages(messages: Any) -> str | None:
    try:
        if read_messages(messages)[-1]["role"] == "assistant":
            return "'messages' end with the assistant's; give what it should answer as 'tgt'"
    except ValueError as error:
        return f"'messages': {error}"
    return None


class _Batch:
    """Rows on their way through an engine.

    Args:
        engine: Runs them.
        prompts: How prompts are written for it.
        params: How completions are decoded, or searched.
    """

    def __init__(
        self, engine: Engine, prompts: PromptFormat, params: SamplingParams | BeamParams
    ) -> None:
        self._engine, self._prompts, self._params = engine, prompts, params
        self._searches: list[tuple[BeamSearch, Answer]] = []  # that are not done
        self._completions: dict[str, Answer] = {}
        self._scores: dict[str, tuple[Answer, int]] = {}  # and where the target begins

    def __len__(self) -> int:
        return len(self._completions) + len(self._searches)

    def add(self, row: Row) -> Answer:
        """Queue a row's completion, and the score of its target."""
        answer = Answer(error=row.error)
        if row.error is not None:
            return answer
        try:
            src = row.values.get("src")
            prompt = self._prompts.tokens(src or read_messages(row.values["messages"]))
            adapter = row.values.get("adapter", self._params.adapter)
            self._add_completion(prompt, answer, row.values.get("reference") or "", adapter)
            if row.target is not None:
                self._add_target(answer, prompt, row.target, adapter)
        except RequestError as error:
            answer.error = str(error)
        return answer

    def _add_completion(
        self, prompt: list[int], answer: Answer, reference: str, adapter: str | None
    ) -> None:
        params = self._params.model_copy(update={"adapter": adapter})
        if isinstance(params, BeamParams):
            search = BeamSearch(self._engine, prompt, params)
            self._searches.append((search, answer))
        else:
            if reference:
                params = params.model_copy(update={"reference": reference})
            self._completions[self._engine.add_request(prompt, params)] = answer

    def _add_target(
        self, answer: Answer, prompt: list[int], text: str, adapter: str | None
    ) -> None:
        target = self._prompts.continuation_tokens(text)
        answer.tgt_tokens = len(target)
        if not target:
            answer.logprob = 0.0
            return
        start = len(prompt)  # the one token is not looked at
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start, adapter=adapter
        )
        try:
            name = self._engine.add_request(prompt + target, params)
        except RequestError as error:
            answer.error = f"tgt: it cannot be scored after its prompt ({error})"
        else:
            self._scores[name] = answer, len(prompt)

    def take(self, result: StepResult) -> int:
        """Note what a step gave; how many rows it completed."""
        known = (self._completions, self._scores)
        own = [o for o in result.finished if any(o.request_id in names for names in known)]
        completed = sum(map(self._take_output, own))
        for search, answer in self._searches:
            search.take(result)
            if search.error is not None:
                answer.error = f"the completion failed: {search.error}"
            elif search.done:
                answer.output = search.hypotheses[0].text(self._engine.tokenizer)
        open_ones = [pair for pair in self._searches if not pair[0].done]
        completed += len(self._searches) - len(open_ones)
        self._searches = open_ones
        return completed

    def _take_output(self, output: RequestOutput) -> bool:
        """Note what a finished request gave; whether it was a row's completion."""
        if (answer := self._completions.get(output.request_id)) is not None:
            if output.finish_reason == "error":
                answer.error = f"the completion failed: {output.error}"
            else:
                answer.output = output.text
            return True
        answer, begin = self._scores[output.request_id]
        if output.finish_reason == "error":
            answer.error = answer.error or f"tgt: scoring it failed: {output.error}"
        else:
            chances, ids = output.prompt_logprobs or [], output.prompt_token_ids
            answer.logprob = sum((chances[i] or {})[ids[i]] for i in range(begin, len(ids)))
        return False


def answer_rows(
    engine: Engine,
    rows: Sequence[Row],
    prompts: PromptFormat,
    params: SamplingParams | BeamParams,
    *,
    progress: bool = True,
) -> list[Answer]:
    """Complete all rows and score their targets; the engine batches them as it has room.

    Args:
        engine: Runs them.
        rows: The rows; those with an error are left out.
        prompts: How prompts are written for the engine's model.
        params: How completions are decoded, or searched.
        progress: Show a progress bar.

    Returns:
        What became of each row, in their order.

    Raises:
        EngineError: a step failed as a whole.
    """
    batch = _Batch(engine, prompts, params)
    answers = [batch.add(row) for row in rows]
    with bar(total=len(batch), title="Predicting", unit="row", shown=progress) as shown:
        while engine.has_unfinished:
            shown.update(batch.take(engine.advance()))
    return answers


def write_rows(path: Path, rows: Sequence[Row], answers: Sequence[Answer]) -> None:
    """Write the rows with their answers: the whole file or nothing.

    Raises:
        CheckpointError: it cannot be written.
    """
    made = [_written(*pair) for pair in zip(rows, answers, strict=True)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made)
    # half a surrogate pair, which UTF-8 cannot hold, stays a JSON escape
    replace_file(path, text.encode("utf-8", "backslashreplace"))


def require_writable(path: Path) -> None:
    """Find out before the work whether its result can be written.

    Raises:
        CheckpointError: it cannot.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder; a file is needed")
        if path.is_file() or not path.exists():  # a pipe or a device is written to as it is
            TemporaryFile(dir=path.parent).close()


def _written(row: Row, answer: Answer) -> dict[str, Any]:
    prompts = {key: row.values[key] for key in PROMPTS if key in row.values} or {"src": None}
    written = {**prompts, "tgt": row.target, "output": answer.output}
    if isinstance(row.target, str):
        written["exact_match"] = _matches(row, answer)
        written["logprob"], written["tgt_tokens"] = answer.logprob, answer.tgt_tokens
    if answer.error is not None:
        written["error"] = answer.error
    ours = (*PROMPTS, "tgt", *RESULTS)
    return written | {key: value for key, value in row.values.items() if key not in ours}


def _matches(row: Row, answer: Answer) -> bool | None:
    """Whether a completion is the target, white space around either aside; None without both."""
    if answer.output is None or row.target is None:
        return None
    return answer.output.strip() == row.target.strip()


def summary(rows: Sequence[Row], answers: Sequence[Answer]) -> str:
    """One line on all rows: how many there are, how well they match, how many failed."""
    text = f"{len(rows)} rows"
    matches = [m for m in map(_matches, rows, answers) if m is not None]
    if matches:
        text += f", exact match {sum(matches) / len(matches):.1%} of {len(matches)}"
    sums = [(a.logprob, a.tgt_tokens) for a in answers if a.logprob is not None and a.tgt_tokens]
    if sums:
        total, tokens = (sum(column) for column in zip(*sums, strict=True))
        text += f", mean log probability {total / tokens:.4f} per token of {tokens}"
    failed = sum(answer.error is not None for answer in answers)
    return text + (f", {failed} failed" if failed else "")


def failures(path: Path, rows: Sequence[Row], answers: Sequence[Answer]) -> list[str]:
    """A line for each of the first failed rows, and one for those beyond them."""
    failed = [(row, answer) for row, answer in zip(rows, answers, strict=True) if answer.error]
    lines = [f"{path}:{row.line}: {answer.error}" for row, answer in failed[:TOLD]]
    more = len(failed) - len(lines)
    return lines + ([f"and {more} rows more; their `error` says why"] if more else [])
