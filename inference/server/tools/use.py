"""What the tools of a request come to: what the template is given, the constraint, the parser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from formats.errors import RequestError
from inference.scheduling.constraint import Constraint
from inference.server.schema.tools import ToolFields
from inference.server.tools.constraint import tool_constraint
from inference.server.tools.parser import ToolParser
from inference.server.tools.template import ToolSupport
from inference.server.tools.tool_format import ToolFormat, tool_formats


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request that may call some.

    Attributes:
        tools: As the chat template takes them.
        constraint: What the answer must be, or None.
    """

    tools: list[dict[str, Any]]
    constraint: Constraint | None
    _format: ToolFormat
    _parallel: bool

    @classmethod
    def of(cls, fields: ToolFields, support: ToolSupport) -> ToolUse | None:
        """The tools of a request; None where it has none, or must not call any.

        Raises:
            RequestError: the model's chat template knows no tools, or no format of calls is known.
        """
        choice = fields.tool_choice or "auto"
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
        parallel = fields.parallel_tool_calls
        constraint = tool_constraint(support.tool_format, functions, choice, parallel=parallel)
        return cls(tools, constraint, support.tool_format, parallel)

    def parser(self) -> ToolParser:
        """A reader of one answer; each choice has its own."""
        names = [tool["function"]["name"] for tool in self.tools]
        return ToolParser(self._format, names, parallel=self._parallel)
