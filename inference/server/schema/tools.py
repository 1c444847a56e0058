"""Tools in the body of a request: functions, and which of them to call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from inference.server.schema.common import Body, JsonObject, Labels

MOST_TOOLS = 128
MOST_DEPTH = 32  # of a schema's objects and lists in one another
MOST_CHARACTERS = 2**16  # of a schema, and of a description


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse a schema of no object, and one that is too deep or too large; nothing recurses."""
    if schema.get("type", "object") != "object":
        raise ValueError('the parameters of a function are a JSON schema of {"type": "object"}')
    level: list[Any] = [schema]
    for _ in range(MOST_DEPTH):
        inner = [v.values() if isinstance(v, Mapping) else v for v in level]
        level = [v for values in inner for v in values if isinstance(v, (Mapping, list))]
    if level:
        raise ValueError(f"a schema of more than {MOST_DEPTH} levels; make it flatter")
    size = len(json.dumps(schema))
    if size > MOST_CHARACTERS:
        raise ValueError(f"a schema of {size} characters; at most {MOST_CHARACTERS} are taken")
    return schema


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]+$", max_length=64)]
Schema = Annotated[JsonObject, AfterValidator(_check_schema)]


class Function(Labels):
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


class Tool(Labels):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The function that has to be called."""

    type: Literal["function"] = "function"
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool
Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS)]


class ToolFields(Body):
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
