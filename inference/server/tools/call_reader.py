"""One call as it comes: a JSON object with a function's name and its arguments."""

from __future__ import annotations

import json
from collections.abc import Collection

from inference.server.tools.json_object import JsonObject

ARGUMENTS = ("arguments", "parameters")  # models mix up the two
PASSED_OVER = ("type", "id")  # which some models add


class CallReader:
    """Reads one object, character by character.

    Args:
        names: Functions that may be called.

    Attributes:
        name: Of the function, once it is certain that this is a call; None before. From then on
            `take_arguments` gives its arguments.
        took: Whether the last character belongs to the arguments.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._object = JsonObject()
        self._key = ""  # of the arguments
        self._taken = 0
        self.name: str | None = None
        self.took = False

    @property
    def closed(self) -> bool:
        """Whether the object is complete."""
        return self._object.closed

    @property
    def complete(self) -> bool:
        """Whether this is a call with whole arguments."""
        return self.name is not None and self._object.member != self._key

    def feed(self, char: str) -> bool:
        """Take the next character; False where no call goes on with it, which ends the reading."""
        self.took = self._object.member in ARGUMENTS
        if not self._object.feed(char):
            return False
        member, members = self._object.member, self._object.members
        if member is not None and member not in ("name", *ARGUMENTS, *PASSED_OVER):
            return False
        if member in ARGUMENTS:
            self._key = self._key or member
        if all(key in members for key in ARGUMENTS):
            return False
        if self.name is None:
            self.name = self._known_name()
        return True

    def take_arguments(self) -> str:
        """The JSON text that the arguments gained since the last time."""
        pieces = self._pieces()[self._taken :]
        self._taken += len(pieces)
        return "".join(pieces)

    def _pieces(self) -> list[str]:
        return self._object.members.get(self._key, [])

    def _known_name(self) -> str | None:
        """The function's name, where it is there and the arguments are an object."""
        pieces = self._object.members.get("name")
        if self._pieces()[:1] != ["{"] or not pieces or self._object.member == "name":
            return None
        name = json.loads("".join(pieces))
        return name if isinstance(name, str) and name in self._names else None
