"""What both models answer: whether answers end, loop or differ, and whether JSON in them is right.

JSON of a schema, or calls of a tool, are written without a grammar that would keep the model to
them. Where the model's chat template knows tools and the way it writes calls is known, it is given
one to call. Others are shown one sentence with its JSON and asked for that of another.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch

from formats.chat_template import has_chat_template
from formats.chat_tokens import ChatEncoder
from inference.requests.request import SamplingParams
from inference.server.tools.parser import ToolParser, join_deltas
from inference.server.tools.use import ToolSupport, tool_support
from ptq.certify.figures import Row
from ptq.certify.setting import Pair, Setting
from ptq.certify.texts import compare
from ptq.evaluate.answers import answers, likelihoods

BEGINNING = 48  # tokens of a text that is gone on with
REPEATED = 16  # tokens at the end of an answer that repeat one span, for a loop
TIMES = 4
CERTAIN = 0.05  # nats of surprisal: what has less is certain
THINGS = (
    "a garden", "a bicycle", "bread", "a river", "snow", "a library", "a violin", "the moon",
    "a ship", "salt", "a bridge", "coffee", "a clock", "a forest", "a letter", "glass",
    "a market", "rain", "a mountain", "honey", "a train", "wool", "a lamp", "a harbour",
)  # fmt: skip
ASKED = (
    "In one short sentence, what is {0}?",
    "Name one thing that goes well with {0}.",
    "Answer with one word: which colour do you think of with {0}?",
    "Write one line of a poem about {0}.",
    "Is {0} heavier than {1}? Answer yes or no.",
    "Which of the two is older, {0} or {1}? Give a short reason.",
    "Give me two words that describe {0}.",
    "What can one do with {0}? Answer briefly.",
)


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        seed: Of its sampling; None for none.
        new: Most tokens of an answer.
        common: Of a chat, how many tokens all chats begin with, as the system's message.
    """

    name: str
    ids: list[int]
    chat: bool
    seed: int | None
    new: int
    common: int


def answer_cases(setting: Setting) -> list[Prompt]:
    """Questions to a chat model, three of four, and beginnings of text."""
    level, draw = setting.level, setting.draw("questions")
    chats = 3 * level.answers // 4
    asked = (ASKED[i % len(ASKED)].format(*draw.sample(THINGS, 2)) for i in range(chats))
    prompts = [chat_tokens(setting, [question]) for question in asked]
    common = sum(1 for _ in takewhile(lambda ids: len({*ids}) == 1, zip(*prompts, strict=False)))
    count = math.ceil((level.answers - chats) / len(setting.texts))
    for kind in setting.texts:
        prompts += setting.windows(kind, count, BEGINNING, "beginnings")
    every = max(1, level.answers // level.drawn)
    new = min(level.new, setting.length // 2)
    return [
        Prompt(
            f"{'question' if i < chats else 'beginning'} {i}",
            ids[: setting.length - new],
            i < chats,
            draw.randrange(2**31) if i % every == 0 else None,
            new,
            common,
        )
        for i, ids in enumerate(prompts)
    ]


def chat_tokens(setting: Setting, turns: Sequence[str]) -> list[int]:
    """A chat of a user's and an assistant's turns, which an answer follows.

    Of a model without a chat template it is plain text.
    """
    if has_chat_template(setting.tokenizer):
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)
        ]
        return ChatEncoder(setting.tokenizer).tokens(messages, answer=True)
    text = "".join(f"{('Question', 'Answer')[i % 2]}: {turn}\n" for i, turn in enumerate(turns))
    return setting.encode(f"{text}Answer:", begins=True)


def measure_answers(pair: Pair, cases: Sequence[Prompt], bar: Any) -> list[list[Row]]:
    """One row of each prompt."""
    prompts = [case.ids for case in cases]
    params = [SamplingParams(max_tokens=case.new) for case in cases]
    greedy = [answers(engine, prompts, params, bar) for engine in pair]
    drawn = [case for case in cases if case.seed is not None]
    bar.total += 2 * len(drawn)
    sampled = [
        answers(
            engine,
            [case.ids for case in drawn],
            [SamplingParams(max_tokens=c.new, temperature=0.8, seed=c.seed) for c in drawn],
            bar,
        )
        for engine in pair
    ]
    same = {c.name: a.token_ids == b.token_ids for c, a, b in zip(drawn, *sampled, strict=True)}
    rows = [_row(case, a, b, same) for case, a, b in zip(cases, *greedy, strict=True)]
    added = torch.tensor([*pair.original.tokenizer.get_added_vocab().values()])
    for row, case, first in zip(rows, cases, greedy[0], strict=True):
        if case.chat:
            ids = _whole(first)
            both = compare(pair, ids, case.name)
            row.values["kl.chat"] = (0.0, both.kl[len(case.ids) - 1 :].mean().item())
            own = torch.isin(torch.tensor(ids[:-1]), added)
            own[1:] |= own[:-1].clone()  # and the token after it: `assistant`, a line's end
            own[: case.common] = False  # one text, not one a chat
            if own.any():
                surprisal = CERTAIN + both.nll_original[own].mean().item()
                row.values["kl.turns"] = (0.0, both.kl[own].mean().item() / surprisal)
        bar.update()
    ended = [i for i, first in enumerate(greedy[0]) if _ended(first)]
    due = [(_whole(greedy[0][i])[:-1], _whole(greedy[0][i])[-1:]) for i in ended]
    bar.total += 2 * len(due)
    ends = [likelihoods(engine, due, bar) for engine in pair]
    for i, (a, _), (b, _) in zip(ended, *ends, strict=True):
        rows[i].values["answers.end"] = (a, b)
    return [[row] for row in rows]


def _whole(output: Any) -> list[int]:
    return [*output.prompt_token_ids, *output.token_ids]


def _ended(output: Any) -> bool:
    return output.finish_reason == "stop"


def _row(case: Prompt, first: Any, other: Any, same: dict[str, bool]) -> Row:
    a, b = list(first.token_ids), list(other.token_ids)
    apart = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    common = next(apart, min(len(a), len(b)))
    values = {
        "answers.equal": (1.0, float(a == b)),
        "answers.first_difference": (float(len(a)), float(common)),
        "answers.no_loop": (float(not loops(first)), float(not loops(other))),
        "answers.length": (math.log(len(a)), math.log(len(b))),
    }
    if case.chat:
        values["answers.ended"] = (float(_ended(first)), float(_ended(other)))
    if case.name in same:
        values["answers.drawn_equal"] = (1.0, float(same[case.name]))
    return Row(case=case.name, values=values)


def loops(output: Any) -> bool:
    """Whether an answer was cut by its limit while it repeated one span."""
    return output.finish_reason == "length" and repeats(list(output.token_ids))


def repeats(ids: Sequence[int]) -> bool:
    """Whether tokens end in one span, `TIMES` times or more, of `REPEATED` tokens or more."""
    for span in range(1, len(ids) // TIMES + 1):
        times = max(TIMES, math.ceil(REPEATED / span))
        end = ids[-span * times :]
        if len(end) == span * times and all(end[i] == end[i % span] for i in range(len(end))):
            return True
    return False


NEW = 72  # tokens of an answer
FIELDS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "name": ({"type": "string"}, ("Anna", "Bela", "Chen", "Dana", "Elif", "Femi", "Gita", "Hugo")),
    "city": ({"type": "string"}, ("Oslo", "Lima", "Turin", "Accra", "Kyoto", "Quito", "Cork")),
    "age": ({"type": "integer"}, tuple(range(19, 80, 3))),
    "seats": ({"type": "integer"}, (2, 4, 5, 7, 9)),
    "price": ({"type": "number"}, (1.5, 2.25, 7.5, 12.75, 19.5)),
    "open": ({"type": "boolean"}, (True, False)),
    "colour": ({"enum": ["red", "green", "blue"]}, ("red", "green", "blue")),
    "tags": (
        {"type": "array", "items": {"type": "string"}},
        (["new"], ["old", "rare"], ["small", "light"]),
    ),
}
TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}
VERBS = ("save", "find", "book", "order")


@dataclass(frozen=True)
class Wanted:
    """A prompt, the object that is right, its schema, and, of a call, the tool and its reader."""

    name: str
    ids: list[int]
    schema: dict[str, Any]
    value: dict[str, Any]
    right: list[int]
    tool: str = ""
    support: ToolSupport | None = field(default=None, compare=False)


def object_cases(setting: Setting) -> list[Wanted]:
    """Objects of schemas that are drawn by the seed."""
    support, draw = tool_support(setting.tokenizer), setting.draw("objects")
    called = support.declared and support.tool_format is not None
    make = _call if called else _object
    made = [make(setting, i, draw, support) for i in range(setting.level.objects)]
    room = setting.length - NEW
    return [case for case in made if len(case.ids) < room and len(case.right) < NEW]


def _drawn(draw: random.Random, names: Sequence[str]) -> dict[str, Any]:
    return {name: draw.choice(FIELDS[name][1]) for name in names}


def _schema(names: Sequence[str]) -> dict[str, Any]:
    own = {name: FIELDS[name][0] for name in names}
    return {"type": "object", "properties": own, "required": list(names)}


def _stated(value: dict[str, Any]) -> str:
    return "; ".join(f"{name}: {_spoken(own)}" for name, own in value.items())


def _spoken(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " and ".join(value) if isinstance(value, list) else str(value)


def _object(setting: Setting, number: int, draw: random.Random, support: ToolSupport) -> Wanted:
    names = draw.sample(list(FIELDS), draw.randint(2, 4))
    shown, value = _drawn(draw, names), _drawn(draw, names)
    schema = _schema(names)
    rule = f"Write the record as JSON that fits this schema, and nothing else: {json.dumps(schema)}"
    turns = [f"{rule}\nRecord: {_stated(shown)}", json.dumps(shown), f"Record: {_stated(value)}"]
    ids = chat_tokens(setting, turns)
    plain = "" if setting.tokenizer.chat_template else " "
    right = setting.encode(plain + json.dumps(value))
    return Wanted(f"object {number}", ids, schema, value, right)


def _call(setting: Setting, number: int, draw: random.Random, support: ToolSupport) -> Wanted:
    names = draw.sample(list(FIELDS), draw.randint(2, 4))
    value, tool = _drawn(draw, names), f"{draw.choice(VERBS)}_record"
    function = {
        "name": tool, "description": "Works on one record.", "parameters": _schema(names)
    }  # fmt: skip
    asked = f"Call {tool} for this record. {_stated(value)}"
    ids = ChatEncoder(setting.tokenizer).tokens(
        [{"role": "user", "content": asked}],
        tools=[{"type": "function", "function": function}],
        answer=True,
    )
    assert support.tool_format is not None
    right = setting.encode(support.tool_format.begin(tool) + json.dumps(value))
    return Wanted(f"call {number}", ids, _schema(names), value, right, tool, support)


def measure_objects(pair: Pair, cases: Sequence[Wanted], bar: Any) -> list[list[Row]]:
    """One row of each object."""
    prompts, params = [case.ids for case in cases], [SamplingParams(max_tokens=NEW)] * len(cases)
    texts = [[o.text for o in answers(engine, prompts, params, bar)] for engine in pair]
    asked = [(case.ids, case.right) for case in cases]
    said = [likelihoods(engine, asked, bar) for engine in pair]
    rows = []
    for case, *both, (a, _), (b, _) in zip(cases, *texts, *said, strict=True):
        judged = [_judged(case, text) for text in both]
        values = {
            f"objects.{name}": (float(judged[0][i]), float(judged[1][i]))
            for i, name in enumerate(("parse", "fit", "right"))
        }
        values["objects.likelihood"] = (a / len(case.right), b / len(case.right))
        rows.append([Row(case=case.name, values=values)])
    return rows


def _judged(case: Wanted, text: str) -> tuple[bool, bool, bool]:
    """Whether an answer parses, fits its schema, and says what is right."""
    found = _of_call(case, text) if case.tool else first_object(text)
    if found is None:
        return False, False, False
    return True, fits(found, case.schema), found == case.value


def _of_call(case: Wanted, text: str) -> Any:
    assert case.support is not None
    assert case.support.tool_format is not None
    parser = ToolParser(case.support.tool_format, [case.tool])
    _, calls = join_deltas([*parser.feed(text), *parser.finish()])
    return json.loads(calls[0].arguments) if parser.called else None


def first_object(text: str) -> dict[str, Any] | None:
    """The first JSON object of a text; None where there is none."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(text[start:])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value fits one of our schemas: types, enums, items, required, no other keys."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        own = schema["properties"]
        whole = isinstance(value, dict) and value.keys() == own.keys()
        return whole and all(fits(value[name], own[name]) for name in own)
    if isinstance(value, bool) != (kind == "boolean") or not isinstance(value, TYPES[kind]):
        return False
    return kind != "array" or all(fits(item, schema["items"]) for item in value)
