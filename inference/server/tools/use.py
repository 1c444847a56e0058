"""What the tools of a request come to: what the template is given, the constraint, the parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from formats.errors import RequestError
from inference.requests.constraint import Constraint
from inference.server.schema.response_format import named_error
from inference.server.schema.tools import NamedTool, ToolChoice, ToolFields
from inference.server.tools.constraint import tool_constraint
from inference.server.tools.parser import ToolParser
from inference.server.tools.template import ToolSupport
from inference.server.tools.tool_format import ToolFormat, tool_formats


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

        Args:
            fields: Of the request.
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
        if not support.told:
            raise RequestError(
                "tools: the model's chat template knows none; leave them out, or start the server "
                "with `--chat-template FILE`, a template that renders them",
                "tools",
            )
        if support.tool_format is None:
            raise RequestError(
                "tools: it is not known how this model writes calls; start the server with "
                f"`--tool-format`, one of {', '.join(tool_formats())}",
                "tools",
            )
        tools = [tool.model_dump(exclude_none=True) for tool in fields.tools]
        for tool in tools:
            tool["function"].pop("strict", None)  # it is not the model's to know
        functions = [tool.function for tool in fields.tools]
        parallel = fields.parallel_tool_calls is not False
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
        raise RequestError(f"tools: there are two named {min(twice)!r}; names are unique", "tools")
    if choice not in ("none", "auto") and not names:
        raise RequestError(
            "tool_choice: there are no tools; give some, or leave it out", "tool_choice"
        )
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        told = f"{choice.function.name!r} is none of the tools; there are {', '.join(names)}"
        raise RequestError(f"tool_choice: {told}", "tool_choice")
