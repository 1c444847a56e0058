"""Which JSON Schemas constrain an output: those of which every keyword is kept, no others.

What libraries write in more words than there need be is first written plainly: see `plain_schema`.

xgrammar reads one keyword of a schema that decides (`$ref`, `const`, `enum`, `anyOf`, `oneOf`,
`allOf`, else `type`) and the keywords that belong to its types; what stands beside them, it
ignores. An answer that breaks a rule which was asked for is worse than no answer, so that all else
is refused here. What it drops with no more than a warning is refused where it is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from inference.requests.plain_schema import (
    ANNOTATIONS,
    OF_ONE,
    OF_SEVERAL,
    WITH_NAMES,
    plain_schema,
    refused,
)

OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset("pattern format minLength maxLength".split()),
    "integer": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
    "number": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split()),
    "array": frozenset("items prefixItems minItems maxItems".split()),
    "object": frozenset(
        "properties required additionalProperties patternProperties propertyNames minProperties "
        "maxProperties".split()
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}
TELLING = {  # keywords by which xgrammar knows a type that is not named
    "object": {"properties", "additionalProperties"},
    "array": {"items", "prefixItems"},
}
DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
FORMATS = (
    "email date time date-time duration ipv4 ipv6 hostname uuid uri uri-reference uri-template "
    "json-pointer relative-json-pointer"
).split()
OF_JSON = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}
LARGEST = 2**63


def check_schema(root: Any) -> None:
    """Check that each keyword of a schema is one that is kept.

    Raises:
        RequestError: one is not; the message says where it stands.
    """
    root = plain_schema(root)
    seen: dict[str, Any] = {}
    references: list[tuple[str, str]] = []
    waiting = [("#", root)]
    while waiting:
        path, schema = waiting.pop()
        seen[path] = schema
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise refused(path, f"{schema!r:.80} is no schema; give an object or a boolean")
        keywords = {*schema} - ANNOTATIONS - ({"$id"} if path == "#" else set())
        deciding = [keyword for keyword in DECIDING if keyword in keywords]
        if deciding:
            _check_deciding(path, schema, deciding[0], keywords)
        else:
            _check_types(path, schema, keywords)
        if "$ref" in schema:
            if not isinstance(schema["$ref"], str):
                raise refused(path, "$ref is a string, such as '#/$defs/NAME'")
            references.append((path, schema["$ref"]))
        waiting += _parts(path, schema)
    for path, target in references:
        if target not in seen or _circular(seen, target):
            raise refused(
                path,
                f"$ref {target!r:.80} is no schema of this document, or itself; refer to one that "
                "is, such as '#' or '#/$defs/NAME'",
            )


def check_pattern(path: str, pattern: Any) -> None:
    """Check that a pattern of a string makes no character that JSON writes with a backslash.

    Raises:
        RequestError: it does, or is no string.
    """
    if not isinstance(pattern, str):
        raise refused(path, "a pattern is a string")
    spared = r"\[\^(?:[^\]\\]|\\.)*\]"  # what a negated class leaves out
    text = re.sub(spared, "", pattern, flags=re.DOTALL)
    hexadecimal = r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}"
    for escape in re.finditer(rf"\\({hexadecimal}|.)|[\"\x00-\x1f]", text):
        found = escape[1] or escape[0]
        code = int(found[1:].strip("{}"), 16) if len(found) > 2 else None
        if (code is not None and (code < 32 or code in (34, 92))) or (
            code is None and (found in '"\\ntrfv0cux' or found < " ")
        ):
            raise refused(
                path,
                f"the pattern {pattern!r:.80} asks for {escape[0]!r}, which a string of JSON holds "
                "only as an escape; leave it out",
            )


def _check_deciding(path: str, schema: dict, deciding: str, keywords: set[str]) -> None:
    beside = keywords - {deciding}
    values = {"const": lambda: [schema["const"]], "enum": lambda: schema["enum"]}.get(deciding)
    if values is not None:
        beside -= {"type"}
        if not isinstance(values(), list) or not values():
            raise refused(path, "enum: give a list of values")
        for value in values():
            _check_value(path, value, schema.get("type"))
    if beside:
        raise refused(
            path,
            f"{', '.join(sorted(beside))} beside {deciding} would not be kept; say it inside",
        )
    if deciding in ("anyOf", "oneOf", "allOf"):
        options = schema[deciding]
        if not isinstance(options, list) or not options:
            raise refused(path, f"{deciding}: give a list of schemas")


def _check_types(path: str, schema: dict, keywords: set[str]) -> None:
    named = schema.get("type")
    types = named if isinstance(named, list) else [named]
    if named is None:
        types = [kind for kind, telling in TELLING.items() if keywords & telling][:1]
        if never := sorted(keywords.difference(*OF_TYPE.values())):
            raise refused(path, f"{', '.join(never)} is not kept; leave it out")
        if keywords and not types:
            given = ", ".join(sorted(keywords))
            raise refused(path, f"{given} is not kept without a type; give one")
    known = [kind for kind in types if isinstance(kind, str) and kind in OF_TYPE]
    if len(known) < len(types) or (named == []):
        raise refused(path, f"type {named!r:.80}; allowed are {', '.join(OF_TYPE)}")
    kept = frozenset().union(*(OF_TYPE[kind] for kind in known)) | {"type"}
    if left := sorted(keywords - kept):
        raise refused(
            path,
            f"{', '.join(left)} is not kept for {' or '.join(known)}; kept are "
            f"{', '.join(sorted(kept))}",
        )
    if "string" in known:
        _check_string(path, schema)
    if "object" in known:
        _check_object(path, schema)


def _check_string(path: str, schema: dict) -> None:
    ways = [key for key in ("pattern", "format") if key in schema]
    ways += ["minLength or maxLength"] if {"minLength", "maxLength"} & {*schema} else []
    if len(ways) > 1:
        raise refused(path, f"{' and '.join(ways)} are not kept together; give one of them")
    if "format" in schema and schema["format"] not in FORMATS:
        found = f"format {schema['format']!r:.40}"
        raise refused(path, f"{found} is not kept; kept are {', '.join(sorted(FORMATS))}")
    if "pattern" in schema:
        check_pattern(path, schema["pattern"])


def _check_object(path: str, schema: dict) -> None:
    named, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list):
        raise refused(path, "properties is an object of schemas, and required a list of names")
    missing = [name for name in required if not isinstance(name, str) or name not in named]
    if missing:
        raise refused(path, f"{missing[0]!r:.80} is required; name it in properties too")
    patterns = _mapping(schema, "patternProperties")
    for pattern in patterns:
        check_pattern(path, pattern)
    ways = [key for key in ("properties", "patternProperties", "propertyNames") if schema.get(key)]
    others = schema.get("additionalProperties", False) is not False
    if len(ways) + (others and ways != ["properties"]) > 1 or len(patterns) > 1:
        given = " and ".join([*ways, *["additionalProperties"] * others])
        raise refused(path, f"{given} of one object are not kept together; give one of them")
    if schema.get("minProperties") and (others or ways != ["properties"]):
        raise refused(path, "minProperties is kept only where properties names all that may come")
    # xgrammar looks for bytes of a name among characters, and for no other spelling of it.
    escaped = [name for name in named if others and json.dumps(name)[1:-1] != name]
    if escaped:
        fault = f"the name {escaped[0]!r:.80} is not kept beside others"
        raise refused(path, f"{fault}; set additionalProperties to false")


def _check_value(path: str, value: Any, named: Any) -> None:
    """Check a value of an enum or a const, to be written as it is, of the types that are named."""
    if isinstance(value, int) and not -LARGEST <= value < LARGEST:
        raise refused(path, f"{value!r:.40} has more digits than are kept")
    if named is not None:
        types = named if isinstance(named, list) else [named]
        kinds = {OF_JSON.get(type(value), "number")}
        if kinds == {"number"} and value == int(value):
            kinds.add("integer")
        if not any(kind in types for kind in kinds):
            raise refused(path, f"{value!r:.80} is not of type {' or '.join(map(str, types))}")


def _parts(path: str, schema: dict) -> Iterator[tuple[str, Any]]:
    """The schemas inside a schema, each with its path."""
    for key in WITH_NAMES:
        for name, part in _mapping(schema, key).items():
            yield f"{path}/{key}/{name}", part
    for key in OF_ONE:
        if key in schema:
            yield f"{path}/{key}", schema[key]
    for key in OF_SEVERAL:
        parts = schema.get(key, [])
        if not isinstance(parts, list):
            raise refused(path, f"{key}: give a list of schemas")
        yield from ((f"{path}/{key}/{i}", part) for i, part in enumerate(parts))


def _circular(schemas: Mapping[str, Any], path: str) -> bool:
    """Whether a schema stands for one that stands for it."""
    passed = set()
    while path in schemas and path not in passed:
        passed.add(path)
        schema = schemas[path]
        if isinstance(schema, dict) and "$ref" in schema:
            path = schema["$ref"]
        elif isinstance(schema, dict) and schema.get("allOf"):
            path = f"{path}/allOf/0"
        else:
            return False
    return path in passed


def _mapping(schema: dict, key: str) -> dict:
    return schema[key] if isinstance(schema.get(key), dict) else {}
