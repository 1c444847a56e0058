"""Bodies that hold texts: of `/v1/completions`, ColossalAI's `/generate`, vLLM's `/tokenize`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from inference.server.schema.chat import AnyMessage, TemplateBody, Tools
from inference.server.schema.common import LIMITS, Body, Int, TokenIds, refused
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


class GenerateBody(Body):
    """The body of `/generate`: a prompt, and fields of transformers' generation config.

    Attributes:
        prompt: A text, completed as it stands.
        stream: Answer in parts, each a JSON object and a NUL byte; also as the text "true".
        max_new_tokens: Most tokens of the answer.
        do_sample: Sample; otherwise the likeliest token is taken.
        temperature: Of sampling.
        top_k: Of the likeliest tokens, so many; 0: all.
        top_p: Of the likeliest tokens, as few as reach this probability.
        min_p: Only tokens at least so likely as this part of the likeliest one's probability.
        repetition_penalty: Divides the logits of tokens of prompt and answer.
        num_beams: Search with so many beams instead.
        length_penalty: Of a beam search.
        early_stopping: Of a beam search.
        seed: Of the random numbers.
        stop: Texts that end the answer.
    """

    prompt: str = Field(min_length=1)
    stream: bool | Literal["true", "false", "True", "False"] = False
    max_new_tokens: Int = Field(default=128, ge=1, lt=2**31)
    do_sample: bool = False
    temperature: float = Field(default=1.0, ge=1e-10, le=1e10)
    top_k: Int = Field(default=0, ge=0, lt=2**31)
    top_p: float = Field(default=1.0, ge=1e-10, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=1e-10, le=1e10)
    num_beams: Int = Field(default=1, ge=1, le=LIMITS.beam_width)
    length_penalty: float = Field(default=1.0, ge=-10, le=10)
    early_stopping: bool | Literal["never"] = False
    seed: Int | None = Field(default=None, ge=0, lt=2**63)
    stop: list[str] = Field(default=[], max_length=LIMITS.stops)

    @property
    def streams(self) -> bool:
        """Whether the answer comes in parts."""
        return self.stream if isinstance(self.stream, bool) else self.stream.lower() == "true"


class TokenizeBody(TemplateBody):
    """The body of `/tokenize`: a text, or the messages of a chat.

    Attributes:
        model: A name of the model.
        prompt: A text.
        messages: A chat, which the model's template writes.
        tools: What the template tells the model of, beside the chat.
        add_special_tokens: Let the tokenizer add its own to a text.
        return_token_strs: Tell the text of each token.
    """

    model: str | None = Field(default=None, max_length=512)
    prompt: str | None = None
    messages: list[AnyMessage] | None = Field(default=None, min_length=1, max_length=4096)
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        if isinstance(value, dict) and (value.get("prompt") is None) == (
            value.get("messages") is None
        ):
            raise ValueError("give either prompt or messages")
        if isinstance(value, dict) and value.get("tools") and value.get("messages") is None:
            raise ValueError("tools belong to messages; give messages in the place of a prompt")
        return value


class DetokenizeBody(Body):
    """The body of `/detokenize`.

    Attributes:
        model: A name of the model.
        tokens: Token ids.
    """

    model: str | None = Field(default=None, max_length=512)
    tokens: TokenIds
