"""What the text of an output must be: said by a request, checked for its cheap limits at once.

`inference.structured` compiles it to token masks in the engine's process. Here nothing heavy is
imported, so that an HTTP process can refuse what is too large before it sends it on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, Literal, NoReturn, get_args

from formats.errors import RequestError, suggestion
from inference.requests.characters import plain_pattern
from inference.requests.json_schema import check_schema
from inference.requests.plain_schema import plain_schema

Kind = Literal["json_object", "json_schema", "regex", "grammar", "structural_tag"]
MOST_DEPTH = 64  # of a schema's objects and lists in one another
MOST_TEXT: Mapping[Kind, int] = {
    "json_object": 0,
    "json_schema": 256 * 1024,
    "regex": 4096,
    "grammar": 64 * 1024,
    "structural_tag": 256 * 1024,
}


@dataclass(frozen=True)
class Constraint:
    """What an output's text must match as a whole; make one by `json_schema` and its like.

    Attributes:
        kind: What `text` is. `json_object` is any JSON object, and has no text.
        text: The JSON Schema as JSON; a regular expression; a grammar in GBNF whose first rule is
            `root`; or a structural tag as JSON, as xgrammar describes them.

    Raises:
        RequestError: it is too long or too deep, or no JSON; `param` is "constraint".
    """

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise unusable(f"kind {self.kind!r}; {suggestion(str(self.kind), get_args(Kind))}")
        if not isinstance(self.text, str):
            raise unusable(f"its text is {self.text!r}; give a string")
        if len(self.text) > MOST_TEXT[self.kind]:
            most = MOST_TEXT[self.kind]
            raise unusable(f"{len(self.text)} characters of {self.kind}; at most {most} are taken")
        if not self.text and self.kind != "json_object":
            raise unusable(f"an empty {self.kind}; leave the constraint out for any text")
        if any("\ud800" <= c <= "\udfff" for c in self.text) or "\0" in self.text:
            raise unusable("its text holds half a surrogate pair or a NUL; give valid Unicode")
        if self.kind in ("json_schema", "structural_tag"):
            _with_schemas(read_json(self.text), self.kind, check_schema)

    @property
    def plain(self) -> str:
        """Its text, with schemas and patterns in the words that are kept; see `plain_schema`."""
        if self.kind == "regex":
            return plain_pattern(self.text)
        if self.kind not in ("json_schema", "structural_tag"):
            return self.text
        value = read_json(self.text)
        made = _with_schemas(value, self.kind, plain_schema)
        return self.text if made == value else write_json(made)

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Constraint:
        """JSON that is valid under a JSON Schema, given as what JSON gives, or as JSON text.

        Properties come in the order in which the schema names them, and others only where
        `additionalProperties` says so.

        Raises:
            RequestError: it is too large or too deep, no JSON, or has a keyword that is not kept;
                see `inference.requests.json_schema`. What shows only when it is compiled, the
                engine tells.
        """
        return cls("json_schema", schema if isinstance(schema, str) else write_json(schema))

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Text that a regular expression matches from its first to its last character.

        Raises:
            RequestError: it is too long.
        """
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, rules: str) -> Constraint:
        """Text that the rule `root` of a grammar in GBNF (llama.cpp's EBNF) derives.

        Raises:
            RequestError: it is too long.
        """
        return cls("grammar", rules)

    @classmethod
    def structural_tag(cls, tag: Mapping[str, Any] | str) -> Constraint:
        """Text some of whose parts, such as tool calls, have a structure; see xgrammar's manual.

        Raises:
            RequestError: it is too large or too deep, or no JSON.
        """
        return cls("structural_tag", tag if isinstance(tag, str) else write_json(tag))


def _with_schemas(value: Any, key: str, change: Callable[[Any], Any]) -> Any:
    """A schema changed, or a structural tag whose schemas are; `key` is what the value is named."""
    if key in ("json_schema", "schema"):
        return change(value)
    if isinstance(value, list):
        return [_with_schemas(part, "", change) for part in value]
    if isinstance(value, dict):
        return {k: _with_schemas(part, k, change) for k, part in value.items()}
    return value


def is_deeper(value: Any, most: int) -> bool:
    """Whether more objects and lists than so many are in one another; nothing recurses."""
    level: list[Any] = [[value]]
    for _ in range(most + 1):
        inner = [v.values() if isinstance(v, Mapping) else v for v in level]
        level = [v for values in inner for v in values if isinstance(v, (Mapping, list))]
    return bool(level)


def read_json(text: str) -> Any:
    """What JSON text holds.

    Raises:
        RequestError: it is no JSON, holds NaN or infinity, or is too deep.
    """
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        deep = is_deeper(value, MOST_DEPTH)
    except ValueError as error:
        raise unusable(f"it is no JSON: {error}") from error
    except RecursionError:
        deep = True
    if deep:
        raise unusable(f"objects and lists more than {MOST_DEPTH} deep; make it flatter")
    return value


def write_json(value: Any) -> str:
    """Compact JSON text; keys keep their order, which is that of the output's.

    Raises:
        RequestError: JSON cannot hold it.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise unusable(f"it cannot be written as JSON: {error}") from error


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if isfinite(value) else _no_number(digits[:20])


def refused(field: str, fault: str) -> RequestError:
    """A field of a request cannot be used, for a reason."""
    return RequestError(f"{field}: {fault}", field)


unusable = partial(refused, "constraint")
