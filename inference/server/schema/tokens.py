"""Bodies of `/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from inference.server.schema.chat import AnyMessage, TemplateBody
from inference.server.schema.common import Body, TokenIds
from inference.server.schema.tools import Tools


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
