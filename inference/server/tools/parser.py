"""Calls in a growing text: what of it is an answer's text, and what are parts of calls.

A call begins where a marker of the format is followed by a JSON object (and, in a format with
`bare`, where an answer begins with one). It is told as soon as the object has a known function's
name and opens its arguments, and the arguments are told as they come. What does not become a call,
such as broken JSON or an unknown name, is text of the answer, unchanged. If arguments that are
being told break off, they stay as they are, and what follows is text. White space next to calls is
dropped. However a text is cut into pieces, the same comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from inference.server.tools.call_reader import CallReader
from inference.server.tools.deltas import CallDelta, ContentDelta, Delta, new_call_id
from inference.server.tools.json_object import SPACE
from inference.server.tools.tool_format import ToolFormat


class ToolParser:
    """Reads one answer.

    Args:
        tool_format: How the model writes calls.
        names: Functions that may be called.
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
        self._deltas: list[Delta] = []
        self._shown: list[str] = []  # text that is no delta yet
        self._held: list[str] = []  # what may turn out to be white space by a call, or a call
        self._partial = ""  # beginning of an expected text, which follows what is held
        self._expected: tuple[str, ...] = (tool_format.marker,)
        self._call = CallReader(())
        self._calls = 0
        self._read: Callable[[str], None] = self._opening if tool_format.bare else self._text

    def feed(self, text: str) -> list[Delta]:
        """What some more text gives; nothing where it has to be waited for what follows."""
        for char in text:
            if self.done:
                break
            self._read(char)
        return self._take()

    def finish(self) -> list[Delta]:
        """No more text comes: what was held back is text, but for white space behind a call."""
        if self._call.complete and SPACE.issuperset(self._held):
            self._held = []
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
            self._announce(call.name)
        if call.complete:
            self.called, self.done = True, not self._parallel
        if not goes_on:
            self._give_up(char)
        elif call.closed and call.name is None:
            self._give_up()
        elif call.closed:
            self._tell_arguments()
            self._held, self._read = [], self._after_call
            expected = (self._format.closing.strip(), self._format.joint, self._format.marker)
            self._expected = tuple(text for text in expected if text)

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
        """What is held is text, and the answer goes on in text; a marker may follow white space."""
        self._tell_arguments()
        if self._partial or not SPACE.issuperset(self._held):
            self._show()
        self._call, self._read, self._expected = CallReader(()), self._text, (self._format.marker,)
        if char:
            self._text(char)

    def _announce(self, name: str) -> None:
        """Tell that a call has begun; what was held is its beginning."""
        self._held = []
        self._flush()
        self._deltas.append(CallDelta(self._calls, id=new_call_id(), name=name))
        self._calls += 1

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
            self._deltas.append(ContentDelta(text))
        self._shown = []

    def _take(self) -> list[Delta]:
        """All deltas since the last time."""
        self._tell_arguments()
        self._flush()
        taken, self._deltas = self._deltas, []
        return taken
