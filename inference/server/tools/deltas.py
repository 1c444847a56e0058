"""What an answer gains: text, or a part of a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import uuid4


@dataclass(frozen=True)
class ContentDelta:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class CallDelta:
    """A part of a call: first one with `id` and `name`, then those with its arguments.

    Attributes:
        index: The call's place among those of the answer, from 0.
        arguments: What the JSON text of the arguments gains.
        id: The call's, with its first part alone.
        name: Of the function, with its first part alone.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ToolCall:
    """A whole call.

    Attributes:
        id: What the answer to it names it by.
        name: Of the function.
        arguments: JSON text; incomplete where the model was cut.
    """

    id: str
    name: str
    arguments: str


Delta = ContentDelta | CallDelta


def new_call_id() -> str:
    """A name for a call that no other has."""
    return f"call_{uuid4().hex[:24]}"


def join_deltas(deltas: Iterable[Delta]) -> tuple[str | None, Sequence[ToolCall]]:
    """An answer's text, None where calls are all it has, and its calls."""
    text: list[str] = []
    calls: list[tuple[str, str, list[str]]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            text.append(delta.text)
            continue
        if delta.id is not None and delta.name is not None:
            calls.append((delta.id, delta.name, []))
        calls[delta.index][2].append(delta.arguments)
    joined = [ToolCall(name, function, "".join(parts)) for name, function, parts in calls]
    return ("".join(text) or None if joined else "".join(text)), joined
