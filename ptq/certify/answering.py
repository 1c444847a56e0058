"""Answers of both models: whether they end, loop, or differ, and how long they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from formats.chat_template import has_chat_template
from inference.requests.chat_tokens import ChatEncoder
from inference.requests.request import SamplingParams
from ptq.certify.divergence import compare
from ptq.certify.figures import Row
from ptq.certify.setting import Pair, Setting, likelihoods
from ptq.evaluate.answers import answers

BEGINNING = 48  # tokens of a text that is gone on with
REPEATED = 16  # tokens at the end of an answer that repeat one span, for a loop
TIMES = 4
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
    """Token ids of a prompt; whether it is a chat; and the seed of its sampling, None for none."""

    name: str
    ids: list[int]
    chat: bool
    seed: int | None
    new: int


def answer_cases(setting: Setting) -> list[Prompt]:
    """Questions to a chat model, three of four, and beginnings of text."""
    level, draw = setting.level, setting.draw("questions")
    chats = 3 * level.answers // 4
    prompts = [_question(setting, i, draw) for i in range(chats)]
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
        )
        for i, ids in enumerate(prompts)
    ]


def _question(setting: Setting, number: int, draw: Any) -> list[int]:
    return chat_tokens(setting, [ASKED[number % len(ASKED)].format(*draw.sample(THINGS, 2))])


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
    for row, case, first in zip(rows, cases, greedy[0], strict=True):
        if case.chat:
            both = compare(pair, _whole(first), case.name)
            row.values["kl.chat"] = (0.0, both.kl[len(case.ids) - 1 :].mean().item())
    ended = [i for i, first in enumerate(greedy[0]) if _ended(first)]
    due = [(_whole(greedy[0][i])[:-1], _whole(greedy[0][i])[-1:]) for i in ended]
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
