"""JSON Schemas as libraries write them, in the fewer words that outputs can be constrained by.

- `$ref` to any place of the document, such as `#/properties/a/anyOf/0`, also with escapes, refers
  to a copy among the document's `$defs`;
- `nullable: true`, OpenAPI's, is one more option, null;
- `allOf` of several schemas, with what stands beside it, and what stands beside a `$ref`, is one
  schema that all of them hold for, and `unevaluatedProperties` are then its additional ones;
- `oneOf` of types or values that differ, or of objects that a property with listed values tells
  apart, is `anyOf`; that property is then required, so that an object is one of them and no other;
- patterns are in ASCII, see `characters`;
- formats of which xgrammar allows more, such as a February of 31 days, are patterns.

What is not among these stays as it is, for `json_schema` to check.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from formats.errors import RequestError
from inference.requests.characters import in_ascii

ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly discriminator "
    "$comment $schema $defs definitions".split()
)
CHOICES = ("anyOf", "oneOf")
WITH_NAMES = ("properties", "patternProperties", "$defs", "definitions")
OF_ONE = ("items", "additionalProperties", "propertyNames")
OF_SEVERAL = ("prefixItems", "anyOf", "oneOf", "allOf")
BOTH: Mapping[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys("minimum exclusiveMinimum minLength minItems minProperties".split(), max),
    **dict.fromkeys("maximum exclusiveMaximum maxLength maxItems maxProperties".split(), min),
}
DAYS = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))"
    r"|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
LENGTHS = {"pattern", "minLength", "maxLength"}
HOURS = r"(?:[01]\d|2[0-3]):[0-5]\d"
TIME = rf"{HOURS}:[0-5]\d(?:\.\d{{1,9}})?(?:Z|[+\-]{HOURS})"
BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
FORMATS = {
    "date": f"^{DAYS}$",
    "time": f"^{TIME}$",
    "date-time": f"^{DAYS}T{TIME}$",
    "ipv4": rf"^(?:{BYTE}\.){{3}}{BYTE}$",
}
MOST_MERGED = 2000  # pairs of schemas


class NothingFitsError(Exception):
    """No value holds for two schemas."""


def plain_schema(root: Any) -> Any:
    """A schema that says the same; what is plain already is given as it is.

    Raises:
        RequestError: schemas that all have to hold cannot be written as one.
    """
    rewriter = _Rewriter(root)
    made = rewriter.schema("#", root)
    while rewriter.waiting:
        name, target = rewriter.waiting.popitem()
        rewriter.definitions[name] = rewriter.schema(f"#/$defs/{name}", target)
    if not rewriter.definitions:
        return made
    return {**made, "$defs": {**made.get("$defs", {}), **rewriter.definitions}}


class _Rewriter:
    """Rewrites one document.

    Attributes:
        definitions: Copies of what was referred to, by name.
        waiting: The like that is not yet rewritten.
    """

    def __init__(self, root: Any) -> None:
        self._root, self._left = root, MOST_MERGED
        self._names: dict[str, str] = {}
        self.definitions: dict[str, Any] = {}
        self.waiting: dict[str, Any] = {}

    def schema(self, path: str, schema: Any) -> Any:
        """A schema in plain words."""
        if not isinstance(schema, dict):
            return schema
        try:
            made = dict(self._flat(schema))
        except NothingFitsError as error:
            raise refused(path, f"no value holds for all of allOf: {error}") from error
        except (RecursionError, TypeError, LookupError, AttributeError) as error:
            raise refused(path, "allOf of these schemas is not kept; write them as one") from error
        if "unevaluatedProperties" in made and not made.keys() & {"$ref", *OF_SEVERAL}:
            made.setdefault("additionalProperties", made.pop("unevaluatedProperties"))
        if isinstance(made.get("$ref"), str):
            made["$ref"] = self._reference(made["$ref"])
        plain = "string" in _listed(made.get("type")) and not made.keys() & LENGTHS
        if plain and isinstance(made.get("format"), str) and made["format"] in FORMATS:
            made["pattern"] = FORMATS[made.pop("format")]
        if isinstance(made.get("pattern"), str):
            made["pattern"] = in_ascii(made["pattern"])
        if isinstance(named := made.get("patternProperties"), dict):
            made["patternProperties"] = {in_ascii(n): part for n, part in named.items()}
        if "anyOf" not in made and (options := self._exclusive(made.get("oneOf"))) is not None:
            made["anyOf"] = options
            del made["oneOf"]
        for key in WITH_NAMES:
            if isinstance(parts := made.get(key), dict):
                made[key] = {n: self.schema(f"{path}/{key}/{n}", part) for n, part in parts.items()}
        for key in OF_ONE:
            if key in made:
                made[key] = self.schema(f"{path}/{key}", made[key])
        for key in OF_SEVERAL:
            if isinstance(parts := made.get(key), list):
                made[key] = [self.schema(f"{path}/{key}/{i}", p) for i, p in enumerate(parts)]
        return made

    def _exclusive(self, options: Any) -> list[Any] | None:
        """Schemas of which no two hold for a value, as they are or with a property required; None
        where none are known."""
        found = [self._meant(option) for option in options] if isinstance(options, list) else []
        if not found or not all(map(_is_plain, found)):
            return None
        if _differ(found) or _of_other_types(found):
            return options
        names = found[0].get("properties")
        for name in names if isinstance(names, dict) else ():
            parts = [own["properties"].get(name) for own in found if _is_object(own)]
            if len(parts) == len(found) and _differ(parts):
                return [
                    option
                    if name in own.get("required", [])
                    else {**option, "required": [*option.get("required", []), name]}
                    for option, own in zip(options, found, strict=True)
                ]
        return None

    def _meant(self, option: Any) -> Any:
        """An option, or what it refers to."""
        if isinstance(option, dict) and _rules(option) == {"$ref"}:
            steps = _steps(option["$ref"])
            return self._at(steps) if steps else None
        return option

    def _reference(self, target: str) -> str:
        """A reference to a copy, unless the place is one that needs none."""
        steps = _steps(target)
        if not steps or target in ("#/$defs/" + steps[-1], "#/definitions/" + steps[-1]):
            return target
        place = self._at(steps)
        if place is None:
            return target
        if target not in self._names:
            taken, number = self._root.get("$defs", {}), len(self._names)
            while (name := f"place{number}") in taken:
                number += len(taken)
            self._names[target] = name
            self.waiting[name] = place
        return f"#/$defs/{self._names[target]}"

    def _at(self, steps: list[str]) -> Any:
        """What stands at a place of the document; None for nothing, and in the place of a list."""
        value = self._root
        for step in steps:
            if isinstance(value, dict):
                value = value.get(step)
            elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
                value = value[int(step)]
            else:
                return None
        return value if isinstance(value, dict | bool) else None

    def _flat(self, schema: Any) -> Any:
        """A schema that is not nullable, nor several that have to hold; what is in it stays."""
        if not isinstance(schema, dict):
            return schema
        nullable = schema.get("nullable")
        if isinstance(nullable, bool):
            rest = {key: value for key, value in schema.items() if key != "nullable"}
            if not nullable or "null" in _listed(rest.get("type")) or not _rules(rest):
                return self._flat(rest)
            return {"anyOf": [rest, {"type": "null"}]}
        joint = [key for key in ("$ref", "allOf") if key in schema]
        parts = schema.get("allOf", [])
        if (
            not joint
            or not isinstance(parts, list)
            or (len(_rules(schema)) == 1 and len(parts) < 2)
        ):
            return schema
        rest = {key: value for key, value in schema.items() if key not in joint}
        made = rest if _rules(rest) else True
        for part in [*({"$ref": schema[key]} for key in joint if key == "$ref"), *parts]:
            made = self._both(made, part)
        kept = {key: value for key, value in rest.items() if key in ANNOTATIONS}
        return {**made, **kept} if isinstance(made, dict) else kept

    def _both(self, one: Any, other: Any) -> Any:
        """A schema that says what both do."""
        self._left -= 1
        if self._left < 0:
            raise RecursionError
        one, other = self._flat(one), self._flat(other)
        if one is False or other is False:
            raise NothingFitsError("false is one of them")
        if one is True or other is True:
            return one if other is True else other
        if not isinstance(one, dict) or not isinstance(other, dict):
            raise TypeError
        for part, turned in ((one, False), (other, True)):
            if "$ref" in part:
                steps = _steps(part["$ref"])
                target = self._at(steps) if steps or part["$ref"] == "#" else None
                if target is None:
                    raise TypeError
                return self._both(one, target) if turned else self._both(target, other)
            if "allOf" in part:  # of one
                target = part["allOf"][0]
                return self._both(one, target) if turned else self._both(target, other)
            for key in CHOICES:
                if key in part:
                    return self._choice(key, one, other, turned)
        return self._merged(one, other)

    def _choice(self, key: str, one: dict, other: dict, turned: bool) -> Any:
        """One of several, each with what has to hold beside."""
        chosen, beside = (other, one) if turned else (one, other)
        rest = {name: value for name, value in chosen.items() if name != key}
        if _rules(rest):
            beside = self._both(beside, rest)
        options, fault = [], None
        for option in chosen[key]:
            try:
                pair = (beside, option) if turned else (option, beside)
                options.append(self._both(*pair))
            except NothingFitsError as error:
                fault = error
        if not options:
            raise fault or TypeError
        return {key: options} if len(options) > 1 else options[0]

    def _merged(self, one: dict, other: dict) -> dict:
        """The keywords of both, of which none is a choice."""
        made = {**other, **one}
        made["type"] = _common_type(one.get("type"), other.get("type"))
        if made["type"] is None:
            del made["type"]
        self._merge_objects(made, one, other)
        for key in (one.keys() & other.keys()) - ANNOTATIONS - {"type", "properties", "required"}:
            first, second = one[key], other[key]
            if key in BOTH:
                made[key] = BOTH[key](first, second)
            elif key in OF_ONE:
                made[key] = self._alternative(first, second)
            elif key == "enum":
                written = {_written(value) for value in second}
                made[key] = [value for value in first if _written(value) in written]
                if not made[key]:
                    raise NothingFitsError("they list no value in common")
            elif _written(first) != _written(second):
                if key == "const":
                    raise NothingFitsError(f"{first!r:.40} is not {second!r:.40}")
                raise TypeError
        if "enum" in made and "const" in made:
            if _written(made["const"]) not in {_written(value) for value in made["enum"]}:
                raise NothingFitsError(f"{made['const']!r:.40} is not in the enum")
            del made["enum"]
        return made

    def _merge_objects(self, made: dict, one: dict, other: dict) -> None:
        """Properties of both; one that either forbids is not among them."""
        names = {**one.get("properties", {}), **other.get("properties", {})}
        required = list(dict.fromkeys([*one.get("required", []), *other.get("required", [])]))
        if required:
            made["required"] = required
        if names:
            others = [schema.get("patternProperties") for schema in (one, other)]
            if any(others) and {*one.get("properties", {})} != {*other.get("properties", {})}:
                raise TypeError
            parts = {n: self._alternative(_property(one, n), _property(other, n)) for n in names}
            made["properties"] = {name: part for name, part in parts.items() if part is not False}
            if left := [name for name in required if parts.get(name) is False]:
                raise NothingFitsError(
                    f"{left[0]!r:.40} is required by one and forbidden by another"
                )

    def _alternative(self, one: Any, other: Any) -> Any:
        """As `_both`, False where nothing fits."""
        try:
            return self._both(one, other)
        except NothingFitsError:
            return False


def _is_plain(schema: Any) -> bool:
    """Whether a schema's own type and values are all that holds: null does where it is nullable."""
    return isinstance(schema, dict) and "nullable" not in schema


def _is_object(schema: Mapping[str, Any]) -> bool:
    own = schema.get("properties"), schema.get("required", [])
    return schema.get("type") == "object" and [*map(type, own)] == [dict, list]


def _of_other_types(schemas: list[Any]) -> bool:
    """Whether all name their types, and no two have one in common."""
    for one, other in combinations([schema.get("type") for schema in schemas], 2):
        try:
            _common_type(one, other)
        except NothingFitsError:
            continue
        return False
    return True


def _differ(schemas: list[Any]) -> bool:
    """Whether all list their values, and no two list the same."""
    values = list[str]()
    for schema in schemas:
        own = schema if _is_plain(schema) else {}
        listed = [own["const"]] if "const" in own else own.get("enum")
        if not isinstance(listed, list):
            return False
        values += {_written(value) for value in listed}
    return len({*values}) == len(values)


def _steps(target: Any) -> list[str]:
    """The steps of a reference into its own document; none for the document, or for another."""
    if not isinstance(target, str) or not target.startswith("#/"):
        return []
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in target[2:].split("/")]


def _rules(schema: Mapping[str, Any]) -> set[str]:
    return {*schema} - ANNOTATIONS


def _listed(named: Any) -> list[Any]:
    return named if isinstance(named, list) else [] if named is None else [named]


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """What a schema says of a property."""
    return schema.get("properties", {}).get(name, schema.get("additionalProperties", True))


def _common_type(one: Any, other: Any) -> Any:
    """The types that two schemas have in common; None where neither names any."""
    if one is None or other is None:
        return one if other is None else other
    first, second = _listed(one), _listed(other)
    common = [t for t in first if t in second or (t == "integer" and "number" in second)]
    common += [t for t in second if t == "integer" and "number" in first and t not in common]
    if not common:
        raise NothingFitsError(f"one is of type {one!r:.40}, another of {other!r:.40}")
    return common[0] if len(common) == 1 else common


def _written(value: Any) -> str:
    """Text that is the same for equal values: 1.0 is 1."""
    return json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True)


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def refused(path: str, message: str) -> RequestError:
    """A schema cannot be kept, by what stands at a place of it."""
    return RequestError(f"constraint: at {path:.200}: {message}", "constraint")
