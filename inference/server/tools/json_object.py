"""JSON as it comes, read character by character (RFC 8259): one object, and one that is a call.

`pydantic_core.from_json` reads half an object, too, but tells neither where an object in a text
ends or breaks, nor how a value was written, and refuses the line breaks in texts that models write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator

MOST_DEPTH = 128  # of objects and lists in one another
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NUMBER_CHARACTERS = frozenset("0123456789+-.eE")
HEX = frozenset("0123456789abcdefABCDEF")
SPACE = frozenset(" \t\n\r")
LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
CLOSERS = {"{": "}", "[": "]"}

Reading = Generator[None, str, None]  # is sent the characters


class JsonObject:
    """Reads one object; tells at each character whether it can still be one.

    Control characters inside of texts, which JSON forbids and models write, become their escapes:
    what `members` holds is valid.

    Attributes:
        members: Pieces of the JSON text of each member of the object, by key; only ever appended
            to. The last member may be incomplete.
        member: Key of the member whose value is being read, or None between members.
    """

    def __init__(self) -> None:
        self.members: dict[str, list[str]] = {}
        self.member: str | None = None
        self.closed = False
        self._reading = self._whole()
        next(self._reading)

    def feed(self, char: str) -> bool:
        """Take the next character; False where no object goes on so, which ends the reading."""
        if self.closed:
            return False
        try:
            self._reading.send(char)
        except StopIteration:
            self.closed = True
        except ValueError:
            return False
        return True

    def _keep(self, char: str) -> None:
        """Add a character to the member's text; white space before it is none of it."""
        if self.member is not None:
            pieces = self.members[self.member]
            if pieces or char not in SPACE:
                pieces.append(char)

    def _next(self, char: str = "") -> Generator[None, str, str]:
        """The first that is no white space of those to come, and of `char` where it is read."""
        while not char or char in SPACE:
            if char:
                self._keep(char)
            char = yield
        return char

    def _whole(self) -> Reading:
        _require((yield) == "{")
        yield from self._container("}", 1)

    def _container(self, closer: str, depth: int) -> Reading:
        """An object or a list after its bracket, which is the so many-th that is open."""
        _require(depth <= MOST_DEPTH)
        char = yield from self._next()
        while char != closer:
            if closer == "}":
                char = yield from self._key(char, depth)
            char = yield from self._value(char, depth)
            if depth == 1:
                self.member = None
            char = yield from self._next(char)
            if char == closer:
                break
            _require(char == ",")
            self._keep(char)
            char = yield from self._next()
            _require(char != closer)
        self._keep(char)

    def _key(self, char: str, depth: int) -> Generator[None, str, str]:
        """A key and its colon; the first character of the value."""
        _require(char == '"')
        key: list[str] = []
        self._keep(char)
        yield from self._text(key.append if depth == 1 else self._keep)
        char = yield from self._next()
        _require(char == ":")
        self._keep(char)
        if depth == 1:
            name: str = json.loads('"' + "".join(key))
            _require(name not in self.members)
            self.member, self.members[name] = name, []
        return (yield from self._next())

    def _value(self, char: str, depth: int) -> Generator[None, str, str]:
        """A value; gives the character that ended it where it is a number."""
        if char not in CLOSERS and char != '"' and char not in LITERALS:
            return (yield from self._number(char))
        self._keep(char)
        if char in CLOSERS:
            yield from self._container(CLOSERS[char], depth + 1)
        elif char == '"':
            yield from self._text(self._keep)
        else:
            for expected in LITERALS[char]:
                _require((yield) == expected)
                self._keep(expected)
        return ""

    def _text(self, keep: Callable[[str], None]) -> Reading:
        """A text after its first quote, to its last."""
        char = ""
        while char != '"':
            char = yield
            keep(char if char >= " " else json.dumps(char)[1:-1])
            if char == "\\":
                escaped = yield
                _require(escaped in '"\\/bfnrtu')
                keep(escaped)
                for _ in range(4 if escaped == "u" else 0):
                    digit = yield
                    _require(digit in HEX)
                    keep(digit)

    def _number(self, number: str) -> Generator[None, str, str]:
        """A number after its first character; the character that ended it."""
        _require(number in NUMBER_CHARACTERS)
        self._keep(number)
        while (char := (yield)) in NUMBER_CHARACTERS:
            self._keep(char)
            number += char
        _require(NUMBER.fullmatch(number) is not None)
        return char


def _require(right: bool) -> None:
    if not right:
        raise ValueError("no object goes on so")


ARGUMENTS = ("arguments", "parameters")  # models mix up the two
PASSED_OVER = ("type", "id")  # which some models add


class CallReader(JsonObject):
    """Reads one object that is a call.

    Attributes:
        name: Of the function, once it is certain that this is a call; None before. From then on
            `take_arguments` gives its arguments.
        took: Whether the last character belongs to the arguments.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._arguments = ""  # their key
        self._taken = 0
        self.name: str | None = None
        self.took = False

    @property
    def complete(self) -> bool:
        """Whether this is a call with whole arguments."""
        return self.name is not None and self.member != self._arguments

    def feed(self, char: str) -> bool:
        """Take the next character; False where no call goes on with it, which ends the reading."""
        self.took = self.member in ARGUMENTS
        if not super().feed(char):
            return False
        if self.member not in (None, "name", *ARGUMENTS, *PASSED_OVER):
            return False
        if self.member in ARGUMENTS:
            self._arguments = self._arguments or self.member
        if all(key in self.members for key in ARGUMENTS):
            return False
        self.name = self.name or self._known_name()
        return True

    def take_arguments(self) -> str:
        """The JSON text that the arguments gained since the last time."""
        pieces = self.members.get(self._arguments, [])[self._taken :]
        self._taken += len(pieces)
        return "".join(pieces)

    def _known_name(self) -> str | None:
        """The function's name, where it is there and the arguments are an object."""
        pieces = self.members.get("name")
        if self.members.get(self._arguments, [])[:1] != ["{"] or not pieces:
            return None
        name = None if self.member == "name" else json.loads("".join(pieces))
        return name if isinstance(name, str) and name in self._names else None
