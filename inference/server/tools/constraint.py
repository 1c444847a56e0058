"""What a model must write where it has to call a tool, or where a call must follow its schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from formats.errors import RequestError
from inference.requests.constraint import Constraint, read_json
from inference.requests.json_schema import check_schema
from inference.server.schema.tools import Function, NamedTool, ToolChoice
from inference.server.tools.tool_format import ToolFormat

MOST_WHITESPACE = 32  # characters of it in a row: else a model may write blanks without end
NOT_BARE = r"([^{\s][\s\S]*)?"  # an answer that is no bare call


def tool_constraint(
    tool_format: ToolFormat,
    functions: Sequence[Function],
    choice: ToolChoice,
    *,
    parallel: bool = True,
    text: Constraint | None = None,
) -> Constraint | None:
    """The constraint of an answer, or None where it is free.

    A model that has to call writes calls alone, and their arguments follow their schemas; where a
    schema has a keyword that is not kept, they are JSON objects, unless its function is `strict`.
    One that may call is free, but if a function is `strict`: the arguments of its calls then follow
    its schema, and those of the others are JSON objects.

    Args:
        tool_format: How calls are written.
        functions: What may be called.
        choice: `auto`, `required` or a function.
        parallel: Whether an answer may hold several calls.
        text: What an answer must be that is no call: JSON, of a schema or any; None if it is free.
    """
    free = choice == "auto"
    if free and text is None and not any(function.strict for function in functions):
        return None
    if isinstance(choice, NamedTool):
        functions = [f for f in functions if f.name == choice.function.name]
    tags = [_tag(tool_format, function, free) for function in functions]
    calls = {"type": "tags_with_separator", "tags": tags, "separator": tool_format.separator}
    calls |= {"at_least_one": True, "stop_after_first": not parallel}
    if free and text is not None:
        schema = read_json(text.text) if text.kind == "json_schema" else {"type": "object"}
        answer = {"type": "json_schema", "json_schema": schema}
        answer["max_whitespace_cnt"] = MOST_WHITESPACE
        calls = {"type": "or", "elements": [calls, answer]}
    elif free and tool_format.bare:
        calls = {"type": "or", "elements": [calls, {"type": "regex", "pattern": NOT_BARE}]}
    elif free:
        calls = {"type": "triggered_tags", "tags": tags, "triggers": [tool_format.marker]}
        calls |= {"at_least_one": False, "stop_after_first": not parallel}
    return Constraint.structural_tag({"type": "structural_tag", "format": calls})


def _tag(tool_format: ToolFormat, function: Function, free: bool) -> dict[str, Any]:
    """A call of a function."""
    promised = function.strict or (not free and _is_kept(function.schema_))
    schema = function.schema_ if promised else {"type": "object"}
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_WHITESPACE}
    begin, end = tool_format.begin(function.name), tool_format.end
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _is_kept(schema: dict[str, Any]) -> bool:
    try:
        check_schema(schema)
    except RequestError:
        return False
    return True
