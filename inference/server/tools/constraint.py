"""What a model must write where it has to call a tool, or where a call must follow its schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference.scheduling.constraint import Constraint
from inference.server.schema.tools import Function, NamedTool, ToolChoice
from inference.server.tools.tool_format import ToolFormat

NOT_BARE = r"([^{\s][\s\S]*)?"  # an answer that is no bare call


def tool_constraint(
    tool_format: ToolFormat, functions: Sequence[Function], choice: ToolChoice, *, parallel: bool
) -> Constraint | None:
    """The constraint of an answer, or None where it is free.

    A model that has to call writes calls alone, and their arguments follow their schemas. One that
    may call is free, but if a function is `strict`: the arguments of its calls then follow its
    schema, and those of the others are JSON objects.
    """
    free = choice == "auto"
    if free and not any(function.strict for function in functions):
        return None
    if isinstance(choice, NamedTool):
        functions = [f for f in functions if f.name == choice.function.name]
    tags = [_tag(tool_format, function, free) for function in functions]
    calls = {"type": "tags_with_separator", "tags": tags, "separator": tool_format.separator}
    calls |= {"at_least_one": True, "stop_after_first": not parallel}
    if free and tool_format.bare:
        text = {"type": "regex", "pattern": NOT_BARE}
        calls = {"type": "or", "elements": [calls, text]}
    elif free:
        calls = {"type": "triggered_tags", "tags": tags, "triggers": [tool_format.marker]}
        calls |= {"at_least_one": False, "stop_after_first": not parallel}
    return Constraint.structural_tag({"type": "structural_tag", "format": calls})


def _tag(tool_format: ToolFormat, function: Function, free: bool) -> dict[str, Any]:
    """A call of a function."""
    schema = {"type": "object"} if free and not function.strict else function.schema_
    content = {"type": "json_schema", "json_schema": schema}
    begin, end = tool_format.begin(function.name), tool_format.end
    return {"type": "tag", "begin": begin, "content": content, "end": end}
