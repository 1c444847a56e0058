"""One answer as it comes: its text, its calls, and why it ended."""

from __future__ import annotations

from typing import Literal

from inference.requests.request import FinishReason
from inference.server.tools.parser import ContentDelta, MessageDelta, ToolParser

Reason = FinishReason | Literal["tool_calls"]


class AnswerReader:
    """Reads one answer.

    Args:
        parser: Finds its calls; without one, all is text.

    Attributes:
        over: Whether the answer has all that is wanted of it, so that the engine may be stopped.
    """

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser
        self.over = False

    def read(
        self, text: str, reason: FinishReason | None
    ) -> tuple[list[MessageDelta], Reason | None]:
        """What new text gives, and why the answer has ended, if it has.

        Args:
            text: What the answer gained.
            reason: Why the engine ended it, or None.
        """
        parser = self._parser
        if parser is None:
            self.over = reason is not None
            return ([ContentDelta(text)] if text else []), reason
        deltas = parser.feed(text)
        self.over = parser.done or reason is not None
        if self.over:
            deltas += parser.finish()
        if parser.done or (reason == "stop" and parser.called):
            return deltas, "tool_calls"
        return deltas, reason
