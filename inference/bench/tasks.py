"""Two kinds of traffic whose texts can be guessed, made of functions of Python's standard library.

    editing    the prompt is a function, and asks for it with a variable renamed; the output is that
    repeated   the prompt is the first half of a function; the same requests come in every run

The outputs of the editing task are forced: most models that one would measure here are too small to
make the edit. The logit of each request's next token of the output is made the largest, and nothing
else knows of it: prompts are computed, drafts are made and verified, and each token is computed as
for a model that makes it. It costs some microseconds a step, which a run with drafts pays as one
without does, and less than one for each row of logits, those of wrong drafts too. Outputs of the
repeated task are the model's own.
"""

from __future__ import annotations

import ast
import io
import sysconfig
import textwrap
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from formats.documents import Strict
from formats.errors import EngineError, RequestError
from formats.tokenizer import load_tokenizer
from inference.cpu.batch import Batch
from inference.cpu.loop import HostLoop
from inference.engine import Engine

TaskName = Literal["editing", "repeated"]
Tokens = tuple[int, ...]
Row = tuple[Tokens, Tokens]  # a prompt, and what follows it in the text
Encode = Callable[[str], Tokens]
REQUESTS = 16
SIZES = range(64, 201)  # tokens of a function, so that it and its edit fit 512
NOTES: dict[TaskName, str] = {
    "editing": "functions of Python's standard library, each to be written again with a variable "
    "renamed. Outputs are forced, with drafts and without: whatever the model says, the logit of "
    "the edited text's next token is made the largest before tokens are chosen",
    "repeated": "first halves of functions of Python's standard library, continued greedily by the "
    "model itself; every run asks for the same, so that all was served before it, in the warm-up",
}


class Task(Strict):
    """Requests of a load whose prompts are text.

    Attributes:
        outputs: Token ids of each output, which are forced; None: what the model says.
    """

    name: TaskName
    prompts: tuple[Tokens, ...]
    lengths: tuple[int, ...]
    outputs: tuple[Tokens, ...] | None = None

    @property
    def note(self) -> str:
        """What it is, and how its outputs come about."""
        return f"{self.name}: {len(self.prompts)} {NOTES[self.name]}"


def make_task(name: TaskName, checkpoint: Path, new_tokens: int) -> Task:
    """The requests of a task.

    Args:
        checkpoint: Folder of the model that is measured; its tokenizer is read.
        new_tokens: Tokens of each output of the repeated task.

    Raises:
        CheckpointError: the model has no tokenizer.
        RequestError: this Python comes without the library's sources.
    """
    tokenizer = load_tokenizer(checkpoint)

    def encode(text: str) -> Tokens:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    make, rows = _edit if name == "editing" else _halves, list[Row]()
    for sources in library_functions():  # a row of each module's first function that gives one
        fitting = (make(source, encode) for source in sources if len(encode(source)) in SIZES)
        rows += islice((row for row in fitting if row is not None), len(rows) < REQUESTS)
    if not rows:
        raise RequestError(
            f"task: this tokenizer makes {SIZES.start} to {SIZES.stop - 1} tokens of no function "
            "of the standard library",
            "task",
        )
    prompts, outputs = zip(*rows, strict=True)
    if name == "repeated":
        return Task(name=name, prompts=prompts, lengths=(new_tokens,) * len(prompts))
    return Task(name=name, prompts=prompts, lengths=tuple(map(len, outputs)), outputs=outputs)


def _edit(source: str, encode: Encode) -> Row | None:
    """A prompt that asks for a function with a variable renamed, and that."""
    edit = renamed(source)
    if edit is None:
        return None
    asked = f"{source}\n\n# The same with {edit.old} renamed to {edit.new}:\n"
    return encode(asked), encode(edit.text)


def _halves(source: str, encode: Encode) -> Row:
    """The first half of a function, and the other."""
    tokens = encode(source)
    return tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]


LARGEST = 1e6  # no model's logit comes near


class ForcedLogits:
    """Logits of steps, of which the largest are those of known texts' next tokens.

    Sequences are known by the first of their blocks, which no two may share, and a block's by the
    tokens that are computed at its beginning.

    Args:
        forward: Runs the tokens of a step.
        texts: Token ids of each request, prompt and output; no two begin alike.
    """

    def __init__(self, forward: Callable[[Batch], Tensor], texts: Sequence[Sequence[int]]) -> None:
        self._forward, self._texts = forward, [tuple(text) for text in texts]
        self._of_block: dict[int, tuple[int, ...]] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """Logits [R, vocabulary] of a step."""
        logits = self._forward(batch)
        starts, positions = batch.query_start.tolist(), batch.positions.tolist()
        rows, at, forced, tokens = batch.rows.tolist(), 0, list[int](), list[int]()
        for i, block in enumerate(batch.block_tables[:, 0].tolist()):
            start, end = starts[i], starts[i + 1]
            if positions[start] == 0:
                self._of_block[block] = self._text(tuple(batch.ids[start:end].tolist()))
            text = self._of_block[block]
            while at < len(rows) and rows[at] < end:
                following = positions[rows[at]] + 1
                if following < len(text):  # else it is the row of a draft after the end
                    forced.append(at)
                    tokens.append(text[following])
                at += 1
        logits.numpy()[forced, tokens] = LARGEST
        return logits

    def _text(self, begun: tuple[int, ...]) -> tuple[int, ...]:
        found = [text for text in self._texts if text[: len(begun)] == begun]
        if len(found) != 1:
            raise EngineError(
                f"{len(found)} of the texts that are forced begin with the {len(begun)} tokens of "
                "a request; exactly one has to"
            )
        return found[0]


@contextmanager
def forced(engine: Engine, texts: Sequence[Sequence[int]]) -> Iterator[None]:
    """Have an engine's requests go on as texts do.

    Args:
        engine: On a CPU, without a prefix cache.
        texts: As in `ForcedLogits`.

    Raises:
        RequestError: the engine chooses tokens on a device.
    """
    loop = engine.loop
    if not isinstance(loop, HostLoop):
        raise RequestError("task: outputs are forced on the host; editing runs on a cpu", "task")
    forward = loop.forward
    loop.forward = ForcedLogits(forward, texts)
    try:
        yield
    finally:
        loop.forward = forward


# of those that recipes evaluate models on (`calibrate.sources`), which none is calibrated on
MODULES = tuple(
    "pdb pickle pickletools plistlib pprint profile pstats random runpy selectors shelve shlex"
    " shutil smtplib socket socketserver statistics subprocess tarfile tempfile textwrap threading"
    " trace traceback typing uuid weakref".split()
)
NAMES = ("value", "entry", "target", "record", "found")  # that variables are renamed to
LEAST = 3  # times that a variable is there


class Edit(NamedTuple):
    """A function with a variable renamed: its name before and after, and the function then."""

    old: str
    new: str
    text: str


def library_functions() -> list[list[str]]:
    """Sources of the functions and methods of some modules, by module, in the order of the files.

    Raises:
        RequestError: this Python comes without the library's sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    missing = [name for name in MODULES if not (folder / f"{name}.py").is_file()]
    if missing:
        raise RequestError(f"task: {folder} has no source of {', '.join(missing)}", "task")
    texts = ((folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES)
    return [list(_functions(text)) for text in texts]


def _functions(module: str) -> Iterator[str]:
    tree, lines = ast.parse(module), module.splitlines(keepends=True)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in [own for parent in (tree, *classes) for own in parent.body]:
        if isinstance(node, ast.FunctionDef):
            yield textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))


def renamed(source: str) -> Edit | None:
    """Rename the variable of a function that is there most often; None where none is often there.

    One whose name is also an attribute's, an argument's in a call or in an f-string keeps it, as do
    `self` and `cls`.
    """
    nodes = list(ast.walk(ast.parse(source)))
    names = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    able = _own_variables(nodes)
    old = next((n for n, count in names.most_common() if n in able and count >= LEAST), None)
    new = next((name for name in NAMES if name not in source), None)
    if old is None or new is None:
        return None
    lines = source.splitlines(keepends=True)
    for word in reversed(list(tokenize.generate_tokens(io.StringIO(source).readline))):
        if word.type == tokenize.NAME and word.string == old:
            (row, start), (_, end) = word.start, word.end
            lines[row - 1] = lines[row - 1][:start] + new + lines[row - 1][end:]
    return Edit(old, new, "".join(lines))


def _own_variables(nodes: Sequence[ast.AST]) -> set[str]:
    """Parameters and variables of a function that have nobody else's name."""
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stored |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    others = {"self", "cls"} | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    others |= {node.arg or "" for node in nodes if isinstance(node, ast.keyword)}
    strings = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    inside = (node for string in strings for node in ast.walk(string))
    return stored - others - {node.id for node in inside if isinstance(node, ast.Name)}
