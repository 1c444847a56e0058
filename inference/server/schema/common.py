"""What bodies are made of."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
)

from inference.server.settings import Limits

LIMITS = Limits()


def _whole(value: Any) -> Any:
    """A number such as 5.0 as the integer that it is: JSON has one kind of numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _wholes(values: Any) -> Any:
    if isinstance(values, list) and float in {*map(type, values)}:
        return [_whole(value) for value in values]
    return values


Int = Annotated[int, BeforeValidator(_whole)]
Int64 = Annotated[Int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], BeforeValidator(_wholes)]


class Body(BaseModel):
    """A JSON object whose fields are known, of their types, and finite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError("it holds a number that is not finite") from error
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_finite)]


class Labels(Body):
    """What clients put on messages, their parts and tools for others; it means nothing here.

    Attributes:
        cache_control: Where Anthropic's cache ends; the prefix cache here needs no marks.
        provider_specific_fields: LiteLLM's, of another provider.
        extra_content: Google's, such as signatures of thoughts.
    """

    cache_control: JsonObject | None = Field(default=None, exclude=True)
    provider_specific_fields: JsonObject | None = Field(default=None, exclude=True)
    extra_content: JsonObject | None = Field(default=None, exclude=True)


def refused(why: str) -> BeforeValidator:
    """Of a field that OpenAI has and this server has not, which is to be absent or null."""

    def check(value: Any) -> None:
        if value is not None:
            raise ValueError(f"this server does not support it: {why}")

    return BeforeValidator(check)


def refused_unless_empty(why: str) -> BeforeValidator:
    """Refuse an object with entries; clients that always send the field send an empty one."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and value:
            raise ValueError(f"this server does not support it: {why}")
        return value

    return BeforeValidator(check)


def refused_if_true(why: str) -> AfterValidator:
    """Of a field that may be false or absent only; a literal False would take 0 as well."""

    def check(value: bool | None) -> bool | None:
        if value:
            raise ValueError(f"this server does not support it: {why}")
        return value

    return AfterValidator(check)


def kind_of_text(value: Any) -> str:
    """Whether a value that may be a text or a list of them is a list."""
    return "texts" if isinstance(value, list) else "text"


def parts_of(*kinds: str) -> BeforeValidator:
    """Of a part of a message, which is to be of one of these types."""

    def check(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise ValueError(
                f"a part of type {kind!r} is not supported: this model reads text only"
            )
        return part

    return BeforeValidator(check)
