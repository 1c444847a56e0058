"""Calls in a growing text: what of it is an answer's text, and what are parts of calls.

A call begins where a marker of the format is followed by a JSON object (and, in a format with
`bare`, where an answer begins with one). It is given as soon as the object has a known function's
name and opens its arguments, and the arguments are given as they come. What does not become a call,
such as broken JSON or an unknown name, is text of the answer, unchanged. If arguments that are
being given break off, they stay as they are, and what follows is text. White space next to calls is
dropped, and so is the closing tag of each, also where other text precedes it. Where an answer ends
directly after a call, inside a tag or inside the beginning of another call, as a limit of tokens
cuts it, that part is dropped, too. However a text is cut into pieces, the same comes out.

`ToolFormat` is a format of calls as data, `FORMATS` are those that are known, and what an answer
gains is text, or a part of a call (`CallDelta`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from uuid import uuid4

from inference.server.tools.json_object import SPACE, CallReader


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes its calls: a JSON object each, with a name and with arguments.

    Attributes:
        name: As `--tool-format` spells it.
        marker: Text that announces a call, anywhere in an answer.
        arguments_key: Key of the arguments, beside `name`.
        opening: What the model is made to write before a call's JSON, where it has to call.
        closing: What then follows the JSON. White space around it is free where calls are read.
        separator: What then stands between two calls. Apart from white space it is required where
            calls follow one another without a marker.
        bare: An answer may also begin with a call that nothing announces.
    """

    name: str
    marker: str
    arguments_key: str
    opening: str
    closing: str
    separator: str
    bare: bool = False

    @property
    def joint(self) -> str:
        """What must stand between the JSON of two calls that share a marker; empty: nothing may."""
        return self.separator.strip()

    def begin(self, name: str) -> str:
        """The text of a call up to its arguments."""
        return f'{self.opening}{{"name": {json.dumps(name)}, "{self.arguments_key}": '

    @property
    def end(self) -> str:
        """The text of a call after its arguments."""
        return "}" + self.closing


FORMATS = {
    # Calls between tags: Hermes 2 and 3, Qwen 2.5, Qwen 3 and many others.
    #     <tool_call>
    #     {"name": "get_weather", "arguments": {"city": "Paris"}}
    #     </tool_call>
    "hermes": ToolFormat(
        name="hermes",
        marker="<tool_call>",
        opening="<tool_call>\n",
        arguments_key="arguments",
        closing="\n</tool_call>",
        separator="\n",
    ),
    # Calls as bare JSON, perhaps after a special token: Llama 3.1, 3.2 and 3.3.
    #     {"name": "get_weather", "parameters": {"city": "Paris"}}
    #     <|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}
    # The special token is not part of the decoded text where the tokenizer calls it special: what
    # is left is the bare form, and an answer that begins with anything else is text.
    "llama3": ToolFormat(
        name="llama3",
        marker="<|python_tag|>",
        bare=True,
        opening="",
        arguments_key="parameters",
        closing="",
        separator="; ",
    ),
}


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


MessageDelta = str | CallDelta  # text of the answer, or a part of a call


def join_deltas(deltas: Iterable[MessageDelta]) -> tuple[str | None, Sequence[CallDelta]]:
    """An answer's text, None where calls are all it has, and its calls, each as one part.

    The arguments of a call are incomplete where the model was cut.
    """
    text: list[str] = []
    calls: list[tuple[CallDelta, list[str]]] = []
    for delta in deltas:
        if isinstance(delta, str):
            text.append(delta)
            continue
        if delta.id is not None:
            calls.append((delta, []))
        calls[delta.index][1].append(delta.arguments)
    whole = [replace(call, arguments="".join(parts)) for call, parts in calls]
    return ("".join(text) or None if whole else "".join(text)), whole


class ToolParser:
    """Reads one answer.

    Args:
        parallel: Whether several calls are wanted.

    Attributes:
        called: Whether there is a call with whole arguments. Where the model then ended by itself,
            that is its reason.
        done: Whether the one call that is wanted is there: what follows is passed over, and the
            model may be stopped.
    """

    def __init__(
        self, tool_format: ToolFormat, names: Collection[str], *, parallel: bool = True
    ) -> None:
        self._format, self._names, self._parallel = tool_format, frozenset(names), parallel
        self.called = self.done = False
        self._deltas: list[MessageDelta] = []
        self._shown: list[str] = []  # text that is no delta yet
        self._held: list[str] = []  # what may turn out to be white space by a call, or a call
        self._partial = ""  # beginning of an expected text, which follows what is held
        self._by_call = False  # what is held belongs to a call, or follows one directly
        self._expected: tuple[str, ...] = (tool_format.marker,)
        self._call = CallReader(())
        self._calls = 0
        self._read: Callable[[str], None] = self._opening if tool_format.bare else self._text

    def feed(self, text: str) -> list[MessageDelta]:
        """What some more text gives; nothing where it has to be waited for what follows."""
        for char in text:
            if self.done:
                break
            self._read(char)
        return self._take()

    def finish(self) -> list[MessageDelta]:
        """No more text comes: what was held back is text, but for the end of a call or half one."""
        tags = [text for text in self._expected if text != self._format.marker]
        cut = self._partial and any(text.startswith(self._partial) for text in tags)
        if self._by_call or cut:
            self._held, self._partial = [], ""
        self._show()
        return self._take()

    def _text(self, char: str) -> None:
        """In text. White space is held, since a marker may follow it, and so is half a marker."""
        if self._match(char):
            return
        self._held.append(char)
        if char not in SPACE:
            self._show()

    def _opening(self, char: str) -> None:
        """Behind a marker or what joins calls: an object, or all of it was text."""
        if char in SPACE:
            self._held.append(char)
        elif char == "{":
            self._call, self._read = CallReader(self._names), self._object
            self._object(char)
        else:
            self._give_up(char)

    def _object(self, char: str) -> None:
        """In an object."""
        call, known = self._call, self._call.name is not None
        goes_on = call.feed(char)
        if goes_on and not (known and call.took):
            self._held.append(char)
        if call.name is not None and not known:
            self._held = []  # it was the beginning of the call
            self._flush()
            self._deltas.append(
                CallDelta(self._calls, id=f"call_{uuid4().hex[:24]}", name=call.name)
            )
            self._calls, self._by_call = self._calls + 1, True
            expected = (self._format.closing.strip(), self._format.joint, self._format.marker)
            self._expected = tuple(text for text in expected if text)
        if call.complete:
            self.called, self.done = True, not self._parallel
        if not goes_on:
            self._give_up(char)
        elif call.closed and call.name is None:
            self._give_up()
        elif call.closed:
            self._tell_arguments()
            self._held, self._read = [], self._after_call

    def _after_call(self, char: str) -> None:
        """Behind an object that is a call: its end, another call, or text."""
        if self._match(char):
            return
        if char in SPACE:
            self._held.append(char)
        else:
            self._give_up(char)

    def _match(self, char: str) -> bool:
        """Whether the character belongs to one of the expected texts; acts on a whole one."""
        partial = self._partial + char
        if not any(text.startswith(partial) for text in self._expected):
            if not self._partial:
                return False
            self._give_up(char)
            return True
        self._partial = partial
        if partial == self._format.closing.strip():
            self._held, self._partial = [], ""
            self._expected = tuple(text for text in self._expected if text != partial)
        elif partial in self._expected:
            self._partial = ""
            self._held.append(partial)
            self._read = self._opening
        return True

    def _give_up(self, char: str = "") -> None:
        """What is held is text, and the answer goes on in text.

        A marker may follow white space, and the tag of a call that was not closed may follow, too.
        """
        self._tell_arguments()
        if self._partial or not SPACE.issuperset(self._held):
            self._show()
        self._call, self._read, self._by_call = CallReader(()), self._text, False
        self._expected = tuple(text for text in self._expected if text != self._format.joint)
        if char:
            self._text(char)

    def _tell_arguments(self) -> None:
        arguments = self._call.take_arguments() if self._call.name is not None else ""
        if arguments:
            self._deltas.append(CallDelta(self._calls - 1, arguments))

    def _show(self) -> None:
        """What is held is text."""
        self._shown += [*self._held, self._partial]
        self._held, self._partial = [], ""

    def _flush(self) -> None:
        text = "".join(self._shown)
        if text:
            self._deltas.append(text)
        self._shown = []

    def _take(self) -> list[MessageDelta]:
        """All deltas since the last time."""
        self._tell_arguments()
        self._flush()
        taken, self._deltas = self._deltas, []
        return taken
