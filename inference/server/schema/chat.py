"""Messages of a chat, and the tools that an answer may call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag

from inference.requests.constraint import is_deeper
from inference.server.schema import generation as base

MOST_TOOLS = 128
MOST_DEPTH = 32  # of a schema's objects and lists in one another
MOST_CHARACTERS = 2**16  # of a schema, and of a description


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse a schema of no object, and one that is too deep or too large."""
    if schema.get("type", "object") != "object":
        raise ValueError('the parameters of a function are a JSON schema of {"type": "object"}')
    if is_deeper(schema, MOST_DEPTH):
        raise ValueError(f"a schema of more than {MOST_DEPTH} levels; make it flatter")
    size = len(json.dumps(schema))
    if size > MOST_CHARACTERS:
        raise ValueError(f"a schema of {size} characters; at most {MOST_CHARACTERS} are taken")
    return schema


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]+$", max_length=64)]
Schema = Annotated[base.JsonObject, AfterValidator(_check_schema)]


class Function(base.Labels):
    """What may be called.

    Attributes:
        name: Letters, digits, `_`, `-` and `.`, at most 64.
        description: What it does, for the model.
        parameters: JSON schema of its arguments; without one they are any object.
        strict: Make calls follow the schema also where the model is free to call.
    """

    name: Name
    description: str | None = Field(default=None, max_length=MOST_CHARACTERS)
    parameters: Schema | None = None
    strict: bool | None = None

    @property
    def schema_(self) -> dict[str, Any]:
        """The schema of its arguments, which says that they are an object."""
        return {"type": "object", **(self.parameters or {})}


class Tool(base.Labels):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(base.Body):
    """The name of a function."""

    name: str


class NamedTool(base.Body):
    """The function that has to be called."""

    type: Literal["function"] = "function"
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool
Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS)]


class ToolFields(base.Body):
    """The fields of a body that tell of tools; a base of bodies.

    Attributes:
        tools: Functions that the model may call.
        tool_choice: `none`; `auto`, as the model likes; `required`, at least one; or the function
            that has to be called. Without tools it is `none`, with tools `auto`.
        parallel_tool_calls: Whether one answer may hold several calls, as it may by default.
    """

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class TextPart(base.Labels):
    """A text as a part of a message."""

    type: Literal["text"]
    text: str


Part = Annotated[TextPart, base.parts_of("text")]
Content = base.Either[str, Annotated[list[Part], Field(min_length=1)]]


class FunctionCall(base.Labels):
    """The function that the assistant called; its arguments are a JSON text."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str
    parsed_arguments: Any = Field(default=None, exclude=True)


class ToolCall(base.Labels):
    """A call that the assistant made."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: base.Int | None = Field(default=None, exclude=True)


ROLES = ("system", "developer", "user", "assistant", "tool")
NO_ROLE = f"there is no such role; allowed are {', '.join(ROLES)}"
KNOWN_ROLE = BeforeValidator(base.refused_where(lambda role: role not in ROLES, NO_ROLE))


class Message(base.Labels):
    """What is said by whom; of text only."""

    role: Annotated[Literal["system", "developer", "user"], KNOWN_ROLE]
    content: Content
    name: str | None = Field(default=None, max_length=256)


class AssistantMessage(base.Labels):
    """What the assistant said, or which tools it called; other fields are those that it may bear
    when it comes back as this server or another, or a client's library, gave it.

    Attributes:
        reasoning_content: What it thought before; templates that write it do so in the last turn.
        reasoning: Its other name.
        prefix: Of Mistral's and DeepSeek's servers: the answer goes on with this message.
    """

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = Field(default=None, max_length=256)
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=128)
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Annotated[None, base.refused("no answer of this server is one")] = None
    audio: Annotated[None, base.refused("this model reads text only")] = None
    function_call: Annotated[None, base.refused("use tool_calls")] = None
    prefix: Annotated[
        bool | None,
        base.refused_if_true("set continue_final_message, and add_generation_prompt false"),
    ] = Field(default=None, exclude=True)
    annotations: list[Any] | None = Field(default=None, exclude=True)
    reasoning_details: list[Any] | None = Field(default=None, exclude=True)
    thinking_blocks: list[Any] | None = Field(default=None, exclude=True)
    images: Annotated[list[Any], Field(max_length=0)] | None = Field(default=None, exclude=True)
    parsed: Any = Field(default=None, exclude=True)


class ToolMessage(base.Labels):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = Field(default=None, max_length=256)
    name: str | None = Field(default=None, max_length=256)


AnyMessage = Annotated[
    Annotated[Message, Tag("other")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")],
    base.by_field("role", "assistant", "tool", default="other"),
]


class TemplateBody(base.Body):
    """How a chat is written.

    Attributes:
        add_generation_prompt: End with the beginning of the assistant's answer.
        continue_final_message: End within the last message, which the answer goes on with.
        chat_template_kwargs: Variables of the chat template, such as `enable_thinking`.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: base.JsonObject | None = None


def text_of(content: str | Sequence[Any] | None) -> str:
    """The text of a message: its parts, a line each."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)
