"""What the tools of a request come to: what the template is given, the constraint, the parser.

Whether a chat template shows the model its tools, and how it writes calls, is found by rendering a
chat with one tool and one call of it, so that templates need no list: a template that renders the
tool's name knows tools, and what it writes for the assistant's call is what the model learned to
write.

A constraint says what a model must write where it has to call a tool, or where a call must follow
its schema.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from formats.chat_template import has_chat_template, render_chat
from formats.errors import RequestError
from inference.requests.constraint import Constraint, read_json, refused
from inference.requests.json_schema import check_schema
from inference.server.schema.chat import Function, NamedTool, ToolChoice, ToolFields
from inference.server.schema.generation import named_error
from inference.server.tools.parser import FORMATS, ToolFormat, ToolParser, join_deltas

NAME, ARGUMENTS = "probe_of_tools", {"probed": "by name"}
PROBE = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"probed": {"type": "string"}}},
    },
}
QUESTION = {"role": "user", "content": "Probe."}


@dataclass(frozen=True)
class ToolSupport:
    """What a model's chats can do with tools.

    Attributes:
        declared: Whether the template tells the model of tools.
        tool_format: How the model writes calls; None where no format is known.
    """

    declared: bool
    tool_format: ToolFormat | None


def tool_support(tokenizer: Any, tool_format: str | None = None) -> ToolSupport:
    """What a tokenizer's chat template makes of tools.

    Args:
        tokenizer: A transformers tokenizer, with the template that chats are rendered by.
        tool_format: Name of the format in which the model writes calls; None finds it out.
    """
    if not has_chat_template(tokenizer):
        return ToolSupport(False, None)
    try:
        declared = NAME in render_chat(tokenizer, [QUESTION], tools=[PROBE], answer=True)
    except ValueError:
        declared = False
    if tool_format is not None:
        return ToolSupport(declared, FORMATS[tool_format])
    answer = _rendered_call(tokenizer) if declared else ""
    return ToolSupport(declared, next((f for f in FORMATS.values() if _reads(f, answer)), None))


def _rendered_call(tokenizer: Any) -> str:
    """What the template writes for an assistant's call; empty where it refuses to."""
    function = {"name": NAME, "arguments": ARGUMENTS}
    call = {"id": "call00000", "type": "function", "function": function}
    chat = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        before = render_chat(tokenizer, [QUESTION], tools=[PROBE], answer=True)
        whole = render_chat(tokenizer, chat, tools=[PROBE])
    except ValueError:
        return ""
    return whole[len(before) :] if whole.startswith(before) else ""


def _reads(tool_format: ToolFormat, answer: str) -> bool:
    """Whether a format reads the probe's call in an answer."""
    parser = ToolParser(tool_format, [NAME])
    _, calls = join_deltas([*parser.feed(answer), *parser.finish()])
    return parser.called and [(c.name, json.loads(c.arguments)) for c in calls] == [
        (NAME, ARGUMENTS)
    ]


MOST_WHITESPACE = 32  # characters of it in a row: else a model may write blanks without end
NOT_BARE = r"([^{\s][\s\S]*)?"  # an answer that is no bare call


def tool_constraint(
    tool_format: ToolFormat,
    functions: Sequence[Function],
    choice: ToolChoice,
    *,
    parallel: bool,
    text: Constraint | None,
) -> Constraint | None:
    """The constraint of an answer, or None where it is free.

    A model that has to call writes calls alone, and their arguments follow their schemas; where a
    schema has a keyword that is not kept, they are JSON objects, unless its function is `strict`.
    One that may call is free, but if a function is `strict`: the arguments of its calls then follow
    its schema, and those of the others are JSON objects.

    Args:
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


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request that may call some.

    Attributes:
        tools: As the chat template takes them.
        constraint: What the answer must be, text or calls; None where it is free.
    """

    tools: list[dict[str, Any]]
    constraint: Constraint | None
    _format: ToolFormat
    _parallel: bool

    @classmethod
    def of(
        cls, fields: ToolFields, support: ToolSupport, text: Constraint | None = None
    ) -> ToolUse | None:
        """The tools of a request; None where it has none, or must not call any.

        A choice of a function is one call of it, as OpenAI has it, `parallel_tool_calls` or not.

        Args:
            support: What the model's chats can do with tools.
            text: What an answer must be that is no call.

        Raises:
            RequestError: the choice is none of the tools, the model's chat template knows no tools,
                or it is not known how the model writes calls.
        """
        choice = fields.tool_choice or "auto"
        _check_choice([tool.function.name for tool in fields.tools or []], choice)
        if not fields.tools or choice == "none":
            return None
        if not support.declared:
            raise refused(
                "tools",
                "the model's chat template knows none; leave them out, or start the server with "
                "`--chat-template FILE`, a template that renders them",
            )
        if support.tool_format is None:
            raise refused(
                "tools",
                "it is not known how this model writes calls; start the server with "
                f"`--tool-format`, one of {', '.join(FORMATS)}",
            )
        tools = [tool.model_dump(exclude_none=True) for tool in fields.tools]
        for tool in tools:
            tool["function"].pop("strict", None)  # it is not the model's to know
        functions = [tool.function for tool in fields.tools]
        parallel = fields.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
        try:
            constraint = tool_constraint(
                support.tool_format, functions, choice, parallel=parallel, text=text
            )
        except RequestError as error:
            raise named_error(error, "tools") from error
        return cls(tools, constraint, support.tool_format, parallel)

    def parser(self) -> ToolParser:
        """A reader of one answer; each choice has its own."""
        names = [tool["function"]["name"] for tool in self.tools]
        return ToolParser(self._format, names, parallel=self._parallel)


def _check_choice(names: Sequence[str], choice: ToolChoice) -> None:
    """Check that names are unique, and that there is what is to be called."""
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise refused("tools", f"there are two named {min(twice)!r}; names are unique")
    if choice not in ("none", "auto") and not names:
        raise refused("tool_choice", "there are no tools; give some, or leave it out")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        fault = f"{choice.function.name!r} is none of the tools; there are {', '.join(names)}"
        raise refused("tool_choice", fault)
