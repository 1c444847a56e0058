"""The body of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from inference.server.schema.common import LIMITS, Int, TokenIds, refused
from inference.server.schema.generation import GenerationBody


def _kind(value: Any) -> str:
    """Which of the four kinds of prompts it is, by its first item."""
    if not isinstance(value, list):
        return "text"
    if value and isinstance(value[0], str):
        return "texts"
    return "lists" if value and isinstance(value[0], list) else "ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Annotated[list[str], Field(max_length=LIMITS.prompts)], Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[Annotated[list[TokenIds], Field(max_length=LIMITS.prompts)], Tag("lists")],
    Discriminator(_kind),
]


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`: as OpenAI's, and more.

    Attributes:
        prompt: A text, texts, token ids, or lists of token ids.
        suffix: Not supported.
        max_tokens: Most tokens of an answer; with `echo`, 0 only tells of the prompt.
        best_of: Answers to try, of which the `n` with the likeliest tokens are given.
        echo: Give the prompt before the answer.
        logprobs: Tell the log probability of each token, and of the so many likeliest ones.
        add_special_tokens: Let the tokenizer add its own to texts, such as a BOS token.
    """

    prompt: Prompt
    suffix: Annotated[None, refused("texts are completed at their end only")] = None
    max_tokens: Int | None = Field(default=None, ge=0, lt=2**31)
    best_of: Int | None = Field(default=None, ge=1, le=LIMITS.choices)
    echo: bool | None = None
    logprobs: Int | None = Field(default=None, ge=0, le=LIMITS.top_logprobs)
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str] | list[TokenIds]:
        """The prompts, one or more."""
        single = isinstance(self.prompt, str) or _kind(self.prompt) == "ids"
        return [self.prompt] if single else self.prompt  # pyright: ignore[reportReturnType]
