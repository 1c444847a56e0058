"""What a chat template makes of tools: whether it tells the model of them, and how it writes calls.

Both are found by rendering a chat with one tool and one call of it, so that templates need no list:
a template that renders the tool's name knows tools, and what it writes for the assistant's call is
what the model learned to write.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from formats.chat_template import has_chat_template, render_chat
from inference.server.tools.deltas import join_deltas
from inference.server.tools.parser import ToolParser
from inference.server.tools.tool_format import ToolFormat, tool_formats

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
        told: Whether the template tells the model of tools.
        tool_format: How the model writes calls; None where no format is known.
    """

    told: bool
    tool_format: ToolFormat | None


def tool_support(tokenizer: Any, tool_format: str | None = None) -> ToolSupport:
    """What a tokenizer's chat template makes of tools.

    Args:
        tokenizer: A transformers tokenizer, with the template that chats are rendered by.
        tool_format: Name of the format in which the model writes calls; None finds it out.
    """
    if not has_chat_template(tokenizer):
        return ToolSupport(False, None)
    formats = tool_formats()
    try:
        told = NAME in render_chat(tokenizer, [QUESTION], tools=[PROBE], answer=True)
    except ValueError:
        told = False
    if tool_format is not None:
        return ToolSupport(told, formats[tool_format])
    answer = _rendered_call(tokenizer) if told else ""
    return ToolSupport(told, next((f for f in formats.values() if _reads(f, answer)), None))


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
