"""What bodies are made of, and the fields that completions and chats share.

Bodies are strict models, in which every field is honoured or refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    field_validator,
)

from formats.errors import RequestError
from inference.requests.constraint import Constraint
from inference.requests.request import MOST_BIASES
from inference.server.settings import Limits

LIMITS, UNSUPPORTED = Limits(), "this server does not support it: "


def _whole(value: Any) -> Any:
    """A number such as 5.0 as the integer that it is: JSON has one kind of numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _wholes(values: Any) -> Any:
    if isinstance(values, list) and float in {*map(type, values)}:
        return [_whole(value) for value in values]
    return values


Int = Annotated[int, BeforeValidator(_whole)]
Int64 = Annotated[Int, Field(ge=-(2**63), le=2**63 - 1)]
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


def refused_where(wrong: Callable[[Any], bool], fault: str) -> Callable[[Any], Any]:
    """A check that refuses some values, and says why."""

    def check(value: Any) -> Any:
        if wrong(value):
            raise ValueError(fault)
        return value

    return check


def refused(why: str) -> BeforeValidator:
    """Of a field that OpenAI has and this server has not, which is to be absent or null."""
    return BeforeValidator(refused_where(lambda value: value is not None, UNSUPPORTED + why))


def refused_unless_empty(why: str) -> BeforeValidator:
    """Refuse an object with entries; clients that always send the field send an empty one."""
    filled = refused_where(lambda v: isinstance(v, dict) and bool(v), UNSUPPORTED + why)
    return BeforeValidator(filled)


def refused_if_true(why: str) -> AfterValidator:
    """Of a field that may be false or absent only; a literal False would take 0 as well."""
    return AfterValidator(refused_where(bool, UNSUPPORTED + why))


def only_types(fault: str, *kinds: str) -> BeforeValidator:
    """Of an object whose `type` is to be one of these; `fault` says so of another, `{kind!r}`."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise ValueError(fault.format(kind=kind))
        return value

    return BeforeValidator(check)


def parts_of(*kinds: str) -> BeforeValidator:
    """Of a part of a message, which is to be of one of these types."""
    fault = "a part of type {kind!r} is not supported: this model reads text only"
    return only_types(fault, *kinds)


def by_field(field: str, *kinds: str, default: str) -> Discriminator:
    """Of objects, or models, whose kind a field names; any other value of it is the default."""

    def kind_of(value: Any) -> str:
        kind = value.get(field) if isinstance(value, dict) else getattr(value, field, None)
        return kind if kind in kinds else default

    return Discriminator(kind_of)


One = TypeVar("One")
Several = TypeVar("Several")
Either = Annotated[  # such as a text, or a list of them
    Annotated[One, Tag("text")] | Annotated[Several, Tag("texts")],
    Discriminator(lambda value: "texts" if isinstance(value, list) else "text"),
]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=LIMITS.stop_characters)]
Stops = Either[Stop, Annotated[list[Stop], Field(max_length=LIMITS.stops)]]
BiasKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Unpadded = Annotated[bool | None, refused_if_true("chunks have no padding")]


class StreamOptions(Body):
    """What a stream tells beside its text.

    Attributes:
        include_usage: A last chunk without choices tells the usage.
        continuous_usage_stats: With it, every chunk tells the usage so far.
        include_obfuscation: Random padding against watchers of sizes; there is none here.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Unpadded = None


class PredictedPart(Body):
    """A text of a predicted output."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """An output that is expected in parts, as OpenAI's predicted outputs.

    Attributes:
        content: Its text, or the parts of it.
    """

    type: Literal["content"]
    content: Either[str, list[PredictedPart]]

    @field_validator("content")
    @classmethod
    def _check_size(cls, content: str | list[PredictedPart]) -> str | list[PredictedPart]:
        texts = [content] if isinstance(content, str) else [part.text for part in content]
        if (found := sum(map(len, texts))) > LIMITS.prediction_characters:
            most = LIMITS.prediction_characters
            raise ValueError(f"{found} characters; at most {most} are taken")
        return content

    @property
    def text(self) -> str:
        """All of it."""
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object; the prompt should ask for one."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON Schema with a name.

    Attributes:
        name: Of what it describes.
        description: What it is for; not used.
        schema: The schema; without one, any JSON object.
        strict: Whether answers keep to it; they do in any case.
    """

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    json_schema: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class GenerationBody(Body):
    """Fields that completions and chats share; those from `top_k` on are not OpenAI's.

    Attributes:
        model: A name of the model, or of an adapter; default the model that is served.
        n: Answers to each prompt.
        stream: Answer with server-sent events.
        stream_options: What the stream tells beside.
        stop: Texts that end an answer; they are not part of it.
        seed: Of the random numbers of the first answer; the others follow.
        temperature: 0 takes the likeliest token.
        top_p: Of the likeliest tokens, as few as reach this probability.
        presence_penalty: Subtracted from the logits of tokens that the answer holds.
        frequency_penalty: Subtracted from them for each time that they occur.
        logit_bias: Added to the logits of tokens, which are keys such as "42".
        user: The client's own name for its user; not used.
        top_k: Of the likeliest tokens, so many; 0 or -1: all.
        min_p: Only tokens at least so likely as this part of the likeliest one's probability.
        repetition_penalty: Divides the logits of tokens of prompt and answer.
        min_tokens: No end before so many tokens.
        ignore_eos: Go on after the model's end tokens.
        stop_token_ids: Tokens that end an answer.
        return_token_ids: Tell the token ids of the prompt and of the answers.
        prediction: A text that the answer is expected to repeat in parts; it changes no token, and
            speeds the answer up where the server runs with `--speculate ngram`.
        response_format: What an answer's text must be.
        beam_width: Search with so many beams instead of sampling; `n` best ones are given.
        length_penalty: Of a beam search: its score is divided by length to this power.
        early_stopping: Of a beam search, as in transformers.
    """

    model: str | None = Field(default=None, max_length=512)
    n: Int | None = Field(default=None, ge=1, le=LIMITS.choices)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops | None = None
    seed: Int64 | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[BiasKey, Bias] | None = Field(default=None, max_length=MOST_BIASES)
    user: str | None = Field(default=None, max_length=512)
    top_k: Int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=1e-10, le=1e10)
    min_tokens: Int | None = Field(default=None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = Field(default=None, max_length=64)
    return_token_ids: bool | None = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    beam_width: Int | None = Field(default=None, ge=1, le=LIMITS.beam_width)
    length_penalty: float | None = Field(default=None, ge=-10, le=10)
    early_stopping: bool | Literal["never"] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def constraint_of(response_format: ResponseFormat | None) -> Constraint | None:
    """What the engine has to keep an answer to.

    Raises:
        RequestError: a schema is too large or too deep, or none.
    """
    schema = None
    if isinstance(response_format, JsonSchemaFormat):
        schema = response_format.json_schema.json_schema
    elif not isinstance(response_format, JsonObjectFormat):
        return None
    try:
        return Constraint.json_object() if schema is None else Constraint.json_schema(schema)
    except RequestError as error:
        raise named_error(error, "response_format") from error


def named_error(error: RequestError, field: str) -> RequestError:
    """An error of a constraint with the name of the field that asked for it; others as they are."""
    if error.param != "constraint":
        return error
    return RequestError(str(error).replace("constraint", field, 1), field)
