"""Two kinds of traffic whose texts can be guessed, made of functions of Python's standard library.

    editing    the prompt is a function, and asks for it with a variable renamed; the output is that
    repeated   the prompt is the first half of a function; the same requests come in every run

What the editing task's outputs are is forced (`inference.bench.tasks.forced`): most models that one
would measure here are too small to make the edit. Nothing else knows of it: prompts are computed,
drafts are made and verified, and each token is computed as for a model that makes it. Outputs of
the repeated task are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from formats.errors import RequestError
from formats.scheme import Strict
from formats.tokenizer import load_tokenizer
from inference.bench.tasks.functions import library_functions, renamed

TaskName = Literal["editing", "repeated"]
Tokens = tuple[int, ...]
Row = tuple[Tokens, Tokens]  # a prompt, and what follows it in the text
Encode = Callable[[str], Tokens]
REQUESTS = 16
SIZES = range(64, 201)  # tokens of a function, so that it and its edit fit 512
TOLD: dict[TaskName, str] = {
    "editing": "functions of Python's standard library, each to be written again with a variable "
    "renamed. Outputs are forced, with drafts and without: whatever the model says, the logit of "
    "the edited text's next token is made the largest before tokens are chosen",
    "repeated": "first halves of functions of Python's standard library, continued greedily by the "
    "model itself; every run asks for the same, so that all was served before it, in the warm-up",
}


class Task(Strict):
    """Requests of a load whose prompts are text.

    Attributes:
        name: Which task.
        prompts: Token ids of each prompt.
        lengths: Tokens of each output.
        outputs: Token ids of each output, which are forced; None: what the model says.
    """

    name: TaskName
    prompts: tuple[Tokens, ...]
    lengths: tuple[int, ...]
    outputs: tuple[Tokens, ...] | None = None

    @property
    def note(self) -> str:
        """What it is, and how its outputs come about."""
        return f"{self.name}: {len(self.prompts)} {TOLD[self.name]}"


def make_task(name: TaskName, checkpoint: Path, new_tokens: int) -> Task:
    """The requests of a task.

    Args:
        name: Which one.
        checkpoint: Folder of the model that is measured; its tokenizer is read.
        new_tokens: Tokens of each output of the repeated task.

    Raises:
        CheckpointError: the model has no tokenizer.
        RequestError: this Python comes without the library's sources.
    """
    tokenizer = load_tokenizer(checkpoint)

    def encode(text: str) -> Tokens:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    make = _edit if name == "editing" else _halves
    rows = list(islice(_first_of_each(library_functions(), encode, make), REQUESTS))
    if not rows:
        raise RequestError(
            f"task: this tokenizer makes {SIZES.start} to {SIZES.stop - 1} tokens of no function "
            "of the standard library",
            "task",
        )
    prompts, outputs = zip(*rows, strict=True)
    if name == "repeated":
        return Task(name=name, prompts=prompts, lengths=(new_tokens,) * len(prompts))
    lengths = tuple(len(output) for output in outputs)
    return Task(name=name, prompts=prompts, lengths=lengths, outputs=outputs)


def _first_of_each(
    modules: Sequence[Sequence[str]], encode: Encode, make: Callable[[str, Encode], Row | None]
) -> Iterator[Row]:
    """A row of each module's first function that has the size and gives one."""
    for sources in modules:
        fitting = (source for source in sources if len(encode(source)) in SIZES)
        row = next((row for source in fitting if (row := make(source, encode))), None)
        if row is not None:
            yield row


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
