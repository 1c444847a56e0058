"""Six tasks that need no network, made of the standard library's evaluation modules.

They are of the kinds by which models are compared: the last word of a passage (Paperno et al.
2016, LAMBADA), the right continuation among four (Zellers et al. 2019, HellaSwag), minimal pairs
(Warstadt et al. 2020, BLiMP), perplexity of whole texts, a number hidden in a long context, and
functions that are run against tests (Chen et al. 2021, HumanEval). Calibration reads other modules,
so that no item was seen there. Items are the same in every run of one Python: what is drawn is
drawn by fixed seeds.

    python_cloze       the last word of a line that occurred before; likelihood of it
    python_choice      which of four lines follows
    python_pairs       a line, or the same with two of its words exchanged
    python_perplexity  perplexity of a word, a byte, and bits a byte of whole passages
    needle             which of four numbers was given a name at the beginning of 4,096 tokens
    python_functions   completions of function heads, run against tests; only where that is allowed
"""

from __future__ import annotations

import keyword
import random
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from datasets import Dataset

from calibrate.sources import stdlib_documents

ITEMS = 200  # of a task, where its source has so many
CONTEXT = 1200  # characters before what is asked
NEEDLE_TOKENS = 4096
WORD = re.compile(r"[A-Za-z_]{4,}")
Item = dict[str, Any]
Encode = Callable[[str], Sequence[int]]
SECONDS, MEMORY = 5, 1 << 30  # of what a model wrote, and bytes


@dataclass(frozen=True)
class Text:
    """What a task may need of a model.

    Attributes:
        encode: Gives the tokens of a text.
        longest: Most tokens of a prompt.
    """

    encode: Encode
    longest: int


def _passages(seed: int) -> Iterator[tuple[str, str, list[str]]]:
    """Passages in a fixed random order: lines before, the next line, all lines of its module."""
    places = []
    for text in stdlib_documents("evaluation"):
        lines = text.splitlines(keepends=True)
        places += [(lines, i) for i in range(40, len(lines) - 1, 7)]
    random.Random(seed).shuffle(places)
    for lines, i in places:
        before = "".join(lines[max(0, i - 40) : i])
        yield before[-CONTEXT:], lines[i], lines


def _first_items(make: Callable[[], Iterator[Item]]) -> Callable[[Text], list[Item]]:
    """A task of the first items that are made, which need nothing of a model."""
    return lambda _: list(islice(make(), ITEMS))


@_first_items
def cloze() -> Iterator[Item]:
    """Lines whose last word occurred before: {context, target}."""
    for before, line, _ in _passages(seed=1):
        words = WORD.findall(line)
        if not words or keyword.iskeyword(words[-1]) or words[-1] not in before:
            continue
        start = line.rindex(words[-1])
        if start > 0 and line[start - 1] == " ":
            yield {"context": before + line[: start - 1], "target": f" {words[-1]}"}


@_first_items
def choice() -> Iterator[Item]:
    """Four lines of a module, of which one follows: {context, choices, answer}."""
    draw = random.Random(2)
    for before, line, lines in _passages(seed=2):
        if len(line.strip()) < 12 or line in before:
            continue
        others = sorted({o for o in lines if len(o.strip()) >= 12 and o not in before} - {line})
        if len(others) < 3:
            continue
        choices = [line, *draw.sample(others, 3)]
        draw.shuffle(choices)
        yield {"context": before, "choices": choices, "answer": choices.index(line)}


@_first_items
def pairs() -> Iterator[Item]:
    """A line, and the same with two of its words exchanged: {context, choices, answer}."""
    draw = random.Random(3)
    for before, line, _ in _passages(seed=3):
        words = list(re.finditer(r"\w+", line))
        two = [(a, b) for a, b in pairwise(words) if a[0] != b[0]]
        if not two or line.lstrip().startswith(("#", '"')):
            continue
        a, b = draw.choice(two)
        other = line[: a.start()] + b[0] + line[a.end() : b.start()] + a[0] + line[b.end() :]
        choices = [line, other]
        draw.shuffle(choices)
        yield {"context": before, "choices": choices, "answer": choices.index(line)}


def passages(_: Text) -> list[Item]:
    """The first 6,000 characters of each module: {text}."""
    return [{"text": text[:6000]} for text in stdlib_documents("evaluation")]


def needle(model: Text) -> list[Item]:
    """Code with a number named at its beginning, then asked for: {context, choices, answer}."""
    draw, found = random.Random(4), []
    filler = "".join(stdlib_documents("evaluation"))
    for _ in range(ITEMS // 4):
        name = f"SECRET_{draw.randrange(16**4):04X}"
        numbers = draw.sample(range(100, 1000), 4)
        head, tail = f"{name} = {numbers[0]}\n", f"\nassert {name} =="
        room = min(NEEDLE_TOKENS, model.longest - 8)
        start = draw.randrange(len(filler) // 2)
        middle = _cut(
            filler[start : start + 8 * room], room - len(model.encode(head + tail)), model
        )
        order = draw.sample(range(4), 4)
        choices = [f" {numbers[i]}" for i in order]
        found.append(
            {"context": head + middle + tail, "choices": choices, "answer": order.index(0)}
        )
    return found


def _cut(text: str, tokens: int, model: Text) -> str:
    """The beginning of a text, of at most so many tokens, to a line's end."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if len(model.encode(text[:middle])) <= tokens:
            low = middle
        else:
            high = middle - 1
    return text[: text.rfind("\n", 0, low) + 1]


def functions(_: Text) -> list[Item]:
    """Heads of functions, and tests: {context, tests}."""
    return [{"context": head, "tests": tests} for head, tests in FUNCTIONS]


def run_tests(doc: Item, results: list[str]) -> dict[str, float]:
    """Whether a completed function passes its tests, in a process of its own."""
    return {"pass@1": float(passes(doc["context"] + results[0], doc["tests"]))}


def _metrics(*names: str) -> list[dict[str, Any]]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


_CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "context",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "metric_list": _metrics("acc"),
}
_TASKS: dict[str, tuple[Callable[[Text], list[Item]], dict[str, Any]]] = {
    "python_cloze": (
        cloze,
        {
            "output_type": "loglikelihood",
            "doc_to_text": "context",
            "doc_to_target": "target",
            "target_delimiter": "",
            "metric_list": [
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                *_metrics("acc"),
            ],
        },
    ),
    "python_choice": (choice, _CHOICE),
    "python_pairs": (pairs, _CHOICE),
    "python_perplexity": (
        passages,
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "text",
            "metric_list": [{"metric": m} for m in ("word_perplexity", "bits_per_byte")],
        },
    ),
    "needle": (needle, _CHOICE),
    "python_functions": (
        functions,
        {
            "output_type": "generate_until",
            "doc_to_text": "context",
            "doc_to_target": "",
            "generation_kwargs": {"until": ["\ndef ", "\nclass ", "\n#"], "max_gen_toks": 64},
            "process_results": run_tests,
            "metric_list": _metrics("pass@1"),
            "unsafe_code": True,
        },
    ),
}
UNSAFE = frozenset({"python_functions"})  # they run what a model has written
NAMES = tuple(_TASKS)


def task_config(name: str, model: Text) -> dict[str, Any]:
    """A local task as lm-eval's configuration.

    Args:
        name: One of `NAMES`.
        model: Whose tokens and length some tasks need.
    """
    make, config = _TASKS[name]

    def dataset(
        **_: Any,
    ) -> dict[str, Dataset]:  # lm-eval copies it: no object of ours may be in it
        return {"test": Dataset.from_list(make(model))}

    return {
        "task": name,
        "custom_dataset": dataset,
        "test_split": "test",
        "metadata": {"version": 1},
        **config,
    }


def _head(signature: str, doc: str, tests: str, body: str = "return") -> tuple[str, str]:
    return f'def {signature}:\n    """{doc}"""\n    {body}', tests


FUNCTIONS: tuple[tuple[str, str], ...] = (
    _head("add(a, b)", "Return the sum of a and b.", "assert add(2, 3) == 5"),
    _head(
        "is_empty(items)",
        "Return True if items has no elements.",
        "assert is_empty([]) and not is_empty([0])",
    ),
    _head("first(items)", "Return the first of items.", "assert first([4, 5, 6]) == 4"),
    _head("last(items)", "Return the last of items.", "assert last([4, 5, 6]) == 6"),
    _head("count(items)", "Return the number of items.", "assert count('abcd') == 4"),
    _head("upper(text)", "Return text in upper case.", "assert upper('aB') == 'AB'"),
    _head(
        "larger(a, b)",
        "Return the larger of the two.",
        "assert larger(2, 1) == 2",
        "if a > b:\n        return",
    ),
    _head("double(x)", "Return x times two.", "assert double(7) == 14"),
    _head(
        "is_none(value)", "Return whether value is None.", "assert is_none(None) and not is_none(0)"
    ),
    _head(
        "keys(mapping)",
        "Return a list of the keys of mapping.",
        "assert list(keys({'a': 1, 'b': 2})) == ['a', 'b']",
    ),
    _head(
        "join(parts)", "Join the strings in parts with commas.", "assert join(['a', 'b']) == 'a,b'"
    ),
    _head(
        "reverse(items)",
        "Return items in reverse order, as a list.",
        "assert list(reverse([1, 2, 3])) == [3, 2, 1]",
    ),
    (
        "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y =",
        "assert Point(1, 2).y == 2",
    ),
    (
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
        "    def push(self, item):\n        self.items.",
        "s = Stack(); s.push(3); assert s.items == [3]",
    ),
    (
        "def total(values):\n    result = 0\n    for value in values:\n        result +=",
        "total([1, 2])",
    ),
    _head(
        "contains(items, item)",
        "Return whether item is in items.",
        "assert contains([1, 2], 2) and not contains([1, 2], 3)",
    ),
)


def passes(code: str, tests: str) -> bool:
    """Whether code runs, and its tests hold, in a process of its own.

    It is isolated from the user's packages and environment and works in an empty folder that is
    removed; its time, memory, files and processes are limited. That keeps a model's mistakes from
    doing harm, and is no prison for code that means harm: allow it for models that are trusted.

    Args:
        tests: Statements that raise where it is wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", f"{code}\n\n{tests}\n"],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
                preexec_fn=_limit,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def _limit() -> None:
    """Bound what the process may use, before it runs what a model wrote."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
