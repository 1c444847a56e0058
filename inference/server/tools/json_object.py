"""JSON as it comes: one object, read character by character (RFC 8259)."""

from __future__ import annotations

import json
import re
from typing import Literal

MOST_DEPTH = 128  # of objects and lists in one another
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NUMBER_CHARACTERS = frozenset("0123456789+-.eE")
HEX = frozenset("0123456789abcdefABCDEF")
SPACE = frozenset(" \t\n\r")
LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
CLOSERS = {"{": "}", "[": "]"}
SPACED = frozenset({"first_key", "next_key", "colon", "value", "first_item", "after"})

State = Literal[
    "begin", "first_key", "next_key", "colon", "value", "first_item", "after", "string", "escape",
    "hex", "number", "literal", "closed",
]  # fmt: skip


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
        self._state: State = "begin"
        self._closers: list[str] = []  # of what is open, the innermost last
        self._token = ""  # the number so far, or what a literal or an escape still lacks
        self._in_key = False
        self._key: list[str] = []

    @property
    def closed(self) -> bool:
        """Whether the object is complete."""
        return self._state == "closed"

    def feed(self, char: str) -> bool:
        """Take the next character; False where no object goes on so, which ends the reading."""
        if self._state == "number":
            if char in NUMBER_CHARACTERS:
                self._keep(char)
                self._token += char
                return True
            if NUMBER.fullmatch(self._token) is None:
                return False
            self._end_value()
        if self.closed:
            return False
        if char in SPACE and self._state in SPACED:
            self._keep(char)
            return True
        pieces = self.members[self.member] if self.member is not None else []
        size = len(pieces)
        right = getattr(self, f"_{self._state}")(char)
        if not right:
            del pieces[size:]
        return right

    def _keep(self, char: str) -> None:
        """Add a character to the member's text; white space before it is none of it."""
        if self.member is not None:
            pieces = self.members[self.member]
            if pieces or char not in SPACE:
                pieces.append(char)

    def _open(self, char: str) -> bool:
        self._keep(char)
        self._closers.append(CLOSERS[char])
        self._state = "first_key" if char == "{" else "first_item"
        return len(self._closers) <= MOST_DEPTH

    def _close(self, char: str) -> bool:
        self._keep(char)
        self._closers.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self._state = "after" if self._closers else "closed"
        if len(self._closers) == 1:
            self.member = None

    def _begin(self, char: str) -> bool:
        return char == "{" and self._open(char)

    def _first_key(self, char: str) -> bool:
        return self._close(char) if char == "}" else self._next_key(char)

    def _next_key(self, char: str) -> bool:
        self._keep(char)
        self._in_key, self._key, self._state = True, [], "string"
        return char == '"'

    def _colon(self, char: str) -> bool:
        self._keep(char)
        self._state = "value"
        if len(self._closers) == 1:
            key: str = json.loads(f'"{"".join(self._key)}"')
            if key in self.members:
                return False
            self.member, self.members[key] = key, []
        return char == ":"

    def _first_item(self, char: str) -> bool:
        return self._close(char) if char == "]" else self._value(char)

    def _value(self, char: str) -> bool:
        if char in CLOSERS:
            return self._open(char)
        self._keep(char)
        if char == '"':
            self._in_key, self._state = False, "string"
        elif char in LITERALS:
            self._token, self._state = LITERALS[char], "literal"
        else:
            self._token, self._state = char, "number"
            return char in NUMBER_CHARACTERS
        return True

    def _after(self, char: str) -> bool:
        if char == self._closers[-1]:
            return self._close(char)
        self._keep(char)
        self._state = "next_key" if self._closers[-1] == "}" else "value"
        return char == ","

    def _string(self, char: str) -> bool:
        if char < " ":
            char = json.dumps(char)[1:-1]
        self._keep(char)
        if char == '"':
            if self._in_key:
                self._state = "colon"
            else:
                self._end_value()
            return True
        if self._in_key:
            self._key.append(char)
        if char == "\\":
            self._state = "escape"
        return True

    def _escape(self, char: str) -> bool:
        self._in_text(char)
        self._token, self._state = "", "hex" if char == "u" else "string"
        return char in '"\\/bfnrtu'

    def _hex(self, char: str) -> bool:
        self._in_text(char)
        self._token += char
        if len(self._token) == 4:
            self._state = "string"
        return char in HEX

    def _in_text(self, char: str) -> None:
        self._keep(char)
        if self._in_key:
            self._key.append(char)

    def _literal(self, char: str) -> bool:
        self._keep(char)
        right, self._token = char == self._token[0], self._token[1:]
        if not self._token:
            self._end_value()
        return right
