"""The body of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from inference.server.schema import generation as base
from inference.server.schema.chat import MOST_TOOLS, Function

KEEPS_NOTHING = "this server keeps no answers; send the whole conversation as input"
UNSTORED = ", and set store to false"
KEEPS_NO_PROMPTS = "it keeps no prompts; send it as instructions and input"
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Id = Annotated[str, Field(max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(base.Labels):
    """A text as a part of a message; what an answer has comes back as it was."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


Part = Annotated[TextPart, base.parts_of("input_text", "output_text")]
Content = base.Either[str, Annotated[list[Part], Field(min_length=1)]]


class MessageItem(base.Body):
    """What was said by whom."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Id | None = None
    status: Status | None = None
    phase: str | None = Field(default=None, max_length=64)


class CallItem(base.Body):
    """A function that the model called."""

    type: Literal["function_call"]
    call_id: Id
    name: str = Field(min_length=1, max_length=256)
    arguments: str
    parsed_arguments: Any = None
    id: Id | None = None
    status: Status | None = None


class OutputItem(base.Body):
    """What a function that was called gave."""

    type: Literal["function_call_output"]
    call_id: Id
    output: Content
    id: Id | None = None
    status: Status | None = None


KINDS = ("message", "function_call", "function_call_output")
OTHER_ITEM = f"an item of type {{kind!r}} is not supported; there are {', '.join(KINDS)}"
AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    base.by_field("type", *KINDS, default="message"),
]
Item = Annotated[AnyItem, base.only_types(OTHER_ITEM, *KINDS)]
OTHER_TOOL = "a tool of type {kind!r} is not supported: give functions only"


class FunctionTool(Function):
    """A function that the model may call; other kinds of tools there are none."""

    type: Literal["function"]


class NamedFunction(base.Body):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class SchemaFormat(base.NamedSchema):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]


TextFormat = Annotated[
    base.TextFormat | base.JsonObjectFormat | SchemaFormat, Field(discriminator="type")
]


class TextOptions(base.Body):
    """What the text of an answer must be."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


NO_CONTROL = "this server has no such control"
NO_EFFORT = base.refused_where(
    lambda v: v not in (None, "none"), f"{NO_CONTROL}; 'none' is all there is"
)


class Reasoning(base.Body):
    """Not supported; clients send it empty, or ask for none."""

    effort: Annotated[Literal["none"] | None, BeforeValidator(NO_EFFORT)] = None
    summary: Annotated[None, base.refused(NO_CONTROL)] = None


class StreamOptions(base.Body):
    """Random padding against watchers of sizes; there is none here."""

    include_obfuscation: base.Unpadded = None


class ResponsesBody(base.Body):
    """The body of `/v1/responses`: as OpenAI's, but nothing is stored.

    Attributes:
        model: A name of the model; default the one that is served.
        input: A text, or what was said, called and answered so far.
        instructions: A system message before it.
        stream: Answer with server-sent events.
        max_output_tokens: Most tokens of the answer; default what the context leaves.
        temperature: 0 takes the likeliest token.
        top_p: Of the likeliest tokens, as few as reach this probability.
        top_logprobs: Tell the log probabilities of the so many likeliest tokens, too.
        text: What the answer's text must be.
        tools: Functions that the model may call.
        tool_choice: `none`, `auto`, `required`, or the function that has to be called.
        parallel_tool_calls: Whether the answer may hold several calls.
        include: What more to tell: the log probabilities; encrypted reasoning there is none.
        store: False, which is the default here.
        metadata: Told again in the answer.
    """

    model: str | None = Field(default=None, max_length=512)
    input: base.Either[str, Annotated[list[Item], Field(min_length=1, max_length=4096)]]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: base.Int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_logprobs: base.Int | None = Field(default=None, ge=0, le=base.LIMITS.top_logprobs)
    text: TextOptions | None = None
    tools: (
        Annotated[
            list[Annotated[FunctionTool, base.only_types(OTHER_TOOL, "function")]],
            Field(max_length=MOST_TOOLS),
        ]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    include: list[Included] | None = None
    store: Annotated[bool | None, base.refused_if_true(KEEPS_NOTHING + UNSTORED)] = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    client_metadata: dict[str, str] | None = None
    user: str | None = Field(default=None, max_length=512)
    safety_identifier: str | None = Field(default=None, max_length=512)
    prompt_cache_key: str | None = Field(default=None, max_length=512)
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    background: Annotated[bool | None, base.refused_if_true(KEEPS_NOTHING)] = None
    reasoning: Reasoning | None = None
    previous_response_id: Annotated[None, base.refused(KEEPS_NOTHING)] = None
    conversation: Annotated[None, base.refused(KEEPS_NOTHING)] = None
    prompt: Annotated[None, base.refused(KEEPS_NO_PROMPTS)] = None
    max_tool_calls: Annotated[None, base.refused("it calls no tools by itself")] = None
    context_management: Annotated[None, base.refused("shorten the input")] = None

    @property
    def logprobs(self) -> bool:
        """Whether log probabilities are given."""
        return "message.output_text.logprobs" in (self.include or ())
