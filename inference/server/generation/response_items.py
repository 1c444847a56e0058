"""The items of a response as they grow, and the events that tell of them in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from inference.server.generation.chat_call import Part
from inference.server.tools.parser import CallDelta, ContentDelta

Event = dict[str, Any]
TokenLogprobs = Callable[[Part], list[dict[str, Any]]]


class ResponseItems:
    """An answer's items: messages and calls, one after another.

    Args:
        logprobs: What is told of the log probabilities of a part's tokens.

    Attributes:
        items: What there is, as OpenAI tells it; the last may be incomplete.
    """

    def __init__(self, logprobs: TokenLogprobs) -> None:
        self._logprobs = logprobs
        self.items: list[dict[str, Any]] = []
        self._open = False  # whether the last item still grows
        self._texts: list[str] = []  # of the item that grows: its text, or its arguments
        self._known: list[dict[str, Any]] = []  # log probabilities of tokens whose text is held

    def add(self, part: Part) -> list[Event]:
        """Take what came; the events that tell of it."""
        events: list[Event] = []
        self._known += self._logprobs(part)
        for delta in part.deltas:
            if isinstance(delta, ContentDelta):
                if not (self._open and self.items[-1]["type"] == "message"):
                    events += [*self._close(), *self._open_message()]
                events.append(self._add_text(delta.text))
            else:
                events += self._add_call(delta)
        return events

    def finish(self, status: str) -> list[Event]:
        """No more comes; an answer without anything has an empty text.

        Args:
            status: Of the last item, `completed` or `incomplete`.
        """
        events = [] if self.items else self._open_message()
        return events + self._close(status)

    @property
    def _place(self) -> dict[str, Any]:
        """Which item an event tells of."""
        return {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}

    def _open_item(self, item: dict[str, Any]) -> Event:
        self.items.append(item)
        self._open, self._texts = True, []
        index = len(self.items) - 1
        return {"type": "response.output_item.added", "output_index": index, "item": dict(item)}

    def _open_message(self) -> list[Event]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"id": f"msg_{uuid4().hex}", "type": "message", "status": "in_progress"}
        added = self._open_item(item | {"role": "assistant", "content": []})
        self.items[-1]["content"] = [part]
        place = {**self._place, "content_index": 0, "part": {**part, "logprobs": []}}
        return [added, {"type": "response.content_part.added", **place}]

    def _add_text(self, text: str) -> Event:
        known, self._known = self._known, []
        self._texts.append(text)
        self.items[-1]["content"][0]["logprobs"] += known
        told = {"content_index": 0, "delta": text, "logprobs": known}
        return {"type": "response.output_text.delta", **self._place, **told}

    def _add_call(self, delta: CallDelta) -> list[Event]:
        events: list[Event] = []
        self._known = []  # of tokens that are no text
        if delta.id is not None:
            events += self._close()
            item = {"id": f"fc_{uuid4().hex}", "type": "function_call", "status": "in_progress"}
            called = {"call_id": delta.id, "name": delta.name, "arguments": ""}
            events.append(self._open_item(item | called))
        if delta.arguments:
            self._texts.append(delta.arguments)
            kind = "response.function_call_arguments.delta"
            events.append({"type": kind, **self._place, "delta": delta.arguments})
        return events

    def _close(self, status: str = "completed") -> list[Event]:
        """End the item that grows, if one does."""
        if not self._open:
            return []
        self._open = False
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        done = {"type": "response.output_item.done", "output_index": len(self.items) - 1}
        return [*self._whole(item, text), done | {"item": item}]

    def _whole(self, item: dict[str, Any], text: str) -> Sequence[Event]:
        """Tell the text of an item as one."""
        if item["type"] == "function_call":
            item["arguments"] = text
            told = {"name": item["name"], "arguments": text}
            return [{"type": "response.function_call_arguments.done", **self._place, **told}]
        [part] = item["content"]
        part["text"] = text
        place = {**self._place, "content_index": 0}
        told = {"text": text, "logprobs": part["logprobs"]}
        return [
            {"type": "response.output_text.done", **place, **told},
            {"type": "response.content_part.done", **place, "part": part},
        ]
