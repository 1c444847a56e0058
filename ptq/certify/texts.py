"""What both models make of texts: KL divergence and perplexity, and facts that long contexts hold.

A context is asked about at several depths; it is computed once. The right answer and three others,
which stand in the same context, are scored by their likelihood. The margin is the right one's log
probability less that of the likeliest other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from formats.errors import EngineError
from inference.accuracy import SequenceScores, compare_predictions
from inference.requests.request import SamplingParams
from ptq.certify.figures import PLACES, Row
from ptq.certify.setting import Pair, Setting
from ptq.certify.statistics import histogram
from ptq.evaluate.answers import answers, likelihoods

BLOCK = 256  # predictions of a long window that count as one case


@dataclass(frozen=True)
class Window:
    """Token ids of a piece of text.

    Attributes:
        long: Whether it is there for its late positions alone.
    """

    name: str
    kind: str
    ids: list[int]
    long: bool = False


def text_cases(setting: Setting) -> list[Window]:
    """Windows of every kind of text, and long ones."""
    level, found = setting.level, list[Window]()
    length = min(level.window, setting.length)
    longest = min(level.longest, setting.length)
    for kind in setting.texts:
        short = setting.windows(kind, level.windows, length, "windows")
        found += [Window(f"{kind} {i}", kind, ids) for i, ids in enumerate(short)]
        if longest > length:
            long = setting.windows(kind, level.long, longest, "long windows")
            found += [Window(f"{kind} long {i}", kind, ids, True) for i, ids in enumerate(long)]
    return found


def measure_text(pair: Pair, cases: Sequence[Window], bar: Any) -> list[list[Row]]:
    """Rows of each window: one of a short one, one for each `BLOCK` predictions of a long one."""
    found = []
    for window in cases:
        both = compare(pair, window.ids, window.name)
        found.append(_late(window, both) if window.long else [_row(window, both)])
        bar.update()
    return found


def compare(pair: Pair, ids: Sequence[int], name: str) -> SequenceScores:
    """What both models predict of a text; no more logits are held than of one step.

    Raises:
        EngineError: logits hold NaN or infinity.
    """
    targets, found, start = torch.tensor(ids[1:]), list[Tensor](), 0
    for p, q in zip(*(engine.score_parts(ids) for engine in pair), strict=True):
        count = min(len(p), len(targets) - start)
        if count:
            part = compare_predictions(p[:count], q[:count], targets[start : start + count])
            found.append(torch.stack([getattr(part, field.name) for field in fields(part)]))
        start += count
    both = SequenceScores(*torch.cat(found, dim=1))
    if not torch.isfinite(both.nll_original + both.nll_quantized + both.kl).all():
        raise EngineError(
            f"{name}: a model's logits hold NaN or infinity; check both with `ptq inspect`"
        )
    return both


def _row(window: Window, both: SequenceScores) -> Row:
    values = {"kl.mean": (0.0, both.kl.mean().item())}
    values[f"kl.{window.kind}"] = values["kl.mean"]
    for start, end in PLACES[:2]:
        if len(both.kl) > start:
            values |= _at(start, both.part(start, end))
    return Row(case=window.name, values=values, counts=histogram(both.kl.numpy()))


def _late(window: Window, both: SequenceScores) -> list[Row]:
    rows = []
    for start, end in PLACES[2:]:
        for first in range(start, min(end, len(both.kl)), BLOCK):
            part = both.part(first, min(first + BLOCK, end))
            name = f"{window.name} from {first}"
            rows.append(Row(case=name, values=_at(start, part), length=first))
    return rows


def _at(start: int, part: SequenceScores) -> dict[str, tuple[float, float]]:
    return {
        f"kl.at_{start}": (0.0, part.kl.mean().item()),
        f"perplexity.at_{start}": (
            part.nll_original.mean().item(), part.nll_quantized.mean().item()
        ),
    }  # fmt: skip


SHORTEST, OTHERS = 1024, 3
MARGIN = 8  # tokens of room, as pieces are tokenized apart
ROOMS = (
    "tower", "mill", "station", "school", "castle", "museum", "hotel", "bakery", "theatre",
    "stable", "chapel", "archive", "cellar", "market", "temple", "studio", "garage", "kitchen",
)  # fmt: skip
COLOURS = ("red", "green", "blue", "white", "black", "yellow", "brown", "grey", "golden", "silver")
ANIMALS = (
    "cat", "horse", "bear", "lion", "wolf", "fish", "bird", "snake", "rabbit", "goat", "tiger",
    "duck", "sheep", "mouse", "dog", "frog", "pig", "fox",
)  # fmt: skip
SUBJECTS = ("The baker", "A neighbour", "The old teacher", "A visitor", "The carpenter", "My aunt")
ACTS = (
    "walked along the street", "closed the window", "read a long letter", "waited for the bus",
    "painted the fence", "washed the plates", "counted the coins", "sang an old song",
)  # fmt: skip
TIMES = ("in the morning", "after lunch", "before it rained", "late at night", "on a quiet day")


@dataclass(frozen=True)
class Question:
    """What is asked of a context: token ids after it, the choices', the right one first."""

    ids: list[int]
    choices: list[list[int]]
    depth: float


@dataclass(frozen=True)
class Context:
    """Token ids that all questions stand after."""

    name: str
    task: str
    length: int
    ids: list[int]
    questions: list[Question]


def context_cases(setting: Setting) -> list[Context]:
    """Contexts of each task, from 1,024 tokens to the level's or the models' limit, doubling."""
    reach, lengths = min(setting.level.reach, setting.length), list[int]()
    while (length := SHORTEST << len(lengths)) <= reach:
        lengths.append(length)
    lengths = lengths or [reach]
    return [
        make(setting, length, number)
        for make in (_needle, _keys, _trace)
        for length in lengths
        for number in range(setting.level.contexts)
    ]


def _assemble(
    setting: Setting,
    name: tuple[str, int, int],
    head: str,
    facts: Sequence[tuple[str, str, str]],
    filler: Any,
) -> Context:
    """A context of filler with facts spread over it: (line, question, right answer) each."""
    task, length, number = name
    draw = setting.draw(f"order {name}")
    count = len(facts)
    extra = MARGIN + max(len(setting.encode(asked + right)) for _, asked, right in facts)
    room = length - extra - len(setting.encode(head, begins=True))
    costs = [len(setting.encode(line)) for line, _, _ in facts]
    left, lines = room - sum(costs), list[str]()
    while left > 0:
        line = filler()
        left -= len(setting.encode(line))
        lines.append(line)
    lines = lines[:-1] if left < 0 else lines
    step = len(lines) / count
    parts = [head]
    for i, (line, _, _) in enumerate(facts):
        parts += [*lines[int(i * step) : int((i + 1) * step)], line]
    ids = setting.encode("".join(parts), begins=True)[: length - extra]
    questions = []
    for i, (_, question, right) in enumerate(facts):
        others = draw.sample(sorted({fact[2] for fact in facts} - {right}), OTHERS)
        choices = [setting.encode(choice) for choice in (right, *others)]
        questions.append(Question(setting.encode(question), choices, round((i + 1) / count, 2)))
    return Context(f"{task} {length} {number}", task, length, ids, questions)


def _needle(setting: Setting, length: int, number: int) -> Context:
    """Sentences, some of which say which animal lives where."""
    draw = setting.draw(f"needle {length} {number}")
    count = setting.level.asked
    animals = dict(zip(draw.sample(ROOMS, count), draw.sample(ANIMALS, count), strict=True))
    said = "Remember: the animal of the {} is the"
    facts = [
        (
            f"{said.format(place)} {animal}.\n",
            f"\nWhich animal was that of the {place}?\n{said.format(place)}",
            f" {animal}",
        )
        for place, animal in animals.items()
    ]
    return _assemble(
        setting, ("needle", length, number), "A story.\n", facts, lambda: _sentence(draw)
    )


def _sentence(draw: random.Random) -> str:
    return f"{draw.choice(SUBJECTS)} {draw.choice(ACTS)} {draw.choice(TIMES)}.\n"


def _keys(setting: Setting, length: int, number: int) -> Context:
    """A long list of keys with words, of which some are asked for."""
    draw = setting.draw(f"keys {length} {number}")
    count, used = setting.level.asked, set[str]()

    def entry(word: str) -> str:
        while (key := f"{draw.choice(COLOURS)} {draw.randrange(100, 1000)}") in used:
            pass
        used.add(key)
        return f"{key} = {word}\n"

    facts = []
    for word in draw.sample(ANIMALS, count):
        line = entry(word)
        key = line.partition(" =")[0]
        facts.append((line, f"\nFrom the list again:\n{key} =", f" {word}"))
    return _assemble(
        setting, ("keys", length, number), "A list of keys and values:\n", facts,
        lambda: entry(draw.choice(ROOMS)),
    )  # fmt: skip


def _trace(setting: Setting, length: int, number: int) -> Context:
    """Assignments of which one hands on the value of another, with lines of code between."""
    draw = setting.draw(f"trace {length} {number}")
    count = setting.level.asked
    names = [f"{draw.choice('abcdefgh')}{i}{draw.randrange(10, 99)}" for i in range(count)]
    values = draw.sample(ANIMALS, count)
    facts = [
        (
            f'{name} = "{value}"\nsame_{name} = {name}\n',
            f'\n# what same_{name} holds\nassert same_{name} == "',
            value,
        )
        for name, value in zip(names, values, strict=True)
    ]

    def filler() -> str:
        return f"total += {draw.randrange(1000)}  # {draw.choice(ROOMS)}\n"

    return _assemble(setting, ("trace", length, number), "total = 0\n", facts, filler)


def measure_contexts(pair: Pair, cases: Sequence[Context], bar: Any) -> list[list[Row]]:
    """One row of each question."""
    return [_measure(pair, case, bar) for case in cases]


def _measure(pair: Pair, case: Context, bar: Any) -> list[Row]:
    asked = [
        ([*case.ids, *question.ids], choice)
        for question in case.questions
        for choice in question.choices
    ]
    said = []
    for engine in pair:
        answers(engine, [case.ids], [SamplingParams(max_tokens=1)], bar)  # then it is in the cache
        said.append(likelihoods(engine, asked, bar))
    rows, width = [], 1 + OTHERS
    for i, question in enumerate(case.questions):
        both = [own[i * width : (i + 1) * width] for own in said]
        margins = [own[0][0] - max(total for total, _ in own[1:]) for own in both]
        greedy = [own[0][1] for own in both]
        values = {
            f"{case.task}.chosen": (float(margins[0] > 0), float(margins[1] > 0)),
            f"{case.task}.said": (float(greedy[0]), float(greedy[1])),
            f"{case.task}.margin": (margins[0], margins[1]),
        }
        name = f"{case.name} at {question.depth:g}"
        rows.append(Row(case=name, values=values, length=case.length, depth=question.depth))
    return rows
