"""Requests to `/v1/completions` of all kinds, and what is right to answer: what `Engine` gives."""

import random
from dataclasses import dataclass, field
from typing import Any

from inference.beam_search import BeamParams, beam_search
from inference.engine import Engine
from inference.requests.constraint import Constraint
from inference.requests.request import SamplingParams

CASES = 96  # different requests
TEXTS = [
    "def add(a, b):\n",
    "class Stack:\n    def push(self, item):\n",
    "import os\n\n\ndef list_files(folder, suffix):\n" * 5,
    "for line in open(path):\n",
    "# " + "a long story, told in one line " * 20 + "\n",
]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "ignore_eos": True},
    {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 1.0, "stop": ["\n\n", "return"]},
    {"temperature": 0.5, "logit_bias": {"17": 2.5, "12": -100.0}},
    {"temperature": 1.0, "response_format": {"type": "json_object"}},
]

TOLD_OTHERWISE = ("stop", "logit_bias", "response_format")  # of a body, than in SamplingParams


@dataclass
class Choice:
    """One answer; the log probabilities are those of its tokens."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[float] | None = None

    def add(self, part: dict[str, Any]) -> None:
        """Take a choice out of an answer or out of an event."""
        self.text += part["text"]
        self.token_ids += part["token_ids"]
        self.finish_reason = part["finish_reason"] or self.finish_reason
        if part["logprobs"] is not None:
            self.logprobs = (self.logprobs or []) + part["logprobs"]["token_logprobs"]


@dataclass
class Answer:
    """Choices, and tokens of the prompt and of all of them."""

    choices: list[Choice]
    prompt_tokens: int
    completion_tokens: int


@dataclass
class Case:
    """A request to `/v1/completions`, and what is right."""

    body: dict[str, Any]
    right: Answer


def make_cases(engine: Engine, rng: random.Random, count: int = CASES) -> list[Case]:
    """Requests of all kinds with what an engine gives to them without a server."""
    return [_beams(engine, rng) if i % 16 == 15 else _sampled(engine, rng) for i in range(count)]


def _prompt(engine: Engine, rng: random.Random) -> str | list[int]:
    text = rng.choice(TEXTS) + "x = 1\n" * rng.randint(0, 3)
    return text if rng.random() < 0.5 else engine.tokenizer(text)["input_ids"]


def _sampled(engine: Engine, rng: random.Random) -> Case:
    values = rng.choice(KINDS) | {"seed": rng.randrange(1000), "max_tokens": rng.randint(1, 60)}
    prompt, n = _prompt(engine, rng), rng.choice([1, 1, 1, 2])
    params = SamplingParams(
        stop=tuple(values.get("stop", ())),
        logit_bias={int(token): v for token, v in values.get("logit_bias", {}).items()},
        constraint=Constraint(kind="json_object") if "response_format" in values else None,
        **{key: v for key, v in values.items() if key not in TOLD_OTHERWISE},
    )
    each = [params.model_copy(update={"seed": values["seed"] + i}) for i in range(n)]
    outputs = engine.generate([prompt] * n, each)  # pyright: ignore[reportArgumentType]
    choices = [
        Choice(
            o.text,
            list(o.token_ids),
            o.finish_reason,
            o.logprobs and [row[t] for t, row in zip(o.token_ids, o.logprobs, strict=True)],
        )
        for o in outputs
    ]
    made = sum(len(choice.token_ids) for choice in choices)
    right = Answer(choices, len(outputs[0].prompt_token_ids), made)
    return Case({"prompt": prompt, "n": n, "return_token_ids": True, **values}, right)


def _beams(engine: Engine, rng: random.Random) -> Case:
    values = {"beam_width": 3, "n": 2, "max_tokens": rng.randint(1, 30)}
    prompt = engine.tokenizer(rng.choice(TEXTS))["input_ids"]
    found = beam_search(engine, [prompt], BeamParams(**values))[0]
    choices = [
        Choice(one.text(engine.tokenizer), list(one.token_ids), one.finish_reason) for one in found
    ]
    made = sum(len(choice.token_ids) for choice in choices)
    body = {"prompt": prompt, "return_token_ids": True, **values}
    return Case(body, Answer(choices, len(prompt), made))
