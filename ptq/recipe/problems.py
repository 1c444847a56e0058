"""Everything wrong with a recipe, said at once: where, which key, what is found and allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from formats.errors import RecipeError, suggestion
from ptq.methods.registry import METHODS
from ptq.recipe.strict_yaml import Key, Origin, Problem

Faults = Iterator[tuple[Key, str]]  # of a recipe's values: where they are, and what is wrong


@dataclass(frozen=True)
class Where:
    """Origins of a recipe's values by key; a value that was not written has that of its parent."""

    origins: Mapping[Key, Origin] = field(default_factory=lambda: {(): Origin("recipe")})

    def __call__(self, key: Key) -> Origin:
        """Origin of the value at `key`."""
        return next(
            self.origins[key[:n]] for n in range(len(key), -1, -1) if key[:n] in self.origins
        )

    def error(self, faults: Iterable[tuple[Key, str]]) -> RecipeError:
        """One error that tells what is wrong with a recipe's values, by their keys."""
        return recipe_error(Problem(self(key), key, text) for key, text in faults)


def recipe_error(problems: Iterable[Problem], what: str = "recipe") -> RecipeError:
    """One error that tells all problems, those of a file in the order of its lines."""
    ordered = sorted(dict.fromkeys(problems), key=lambda p: (p.origin.line == 0, p.origin.line))
    if len(ordered) == 1:
        return RecipeError(str(ordered[0]))
    lines = "\n  ".join(map(str, ordered))
    return RecipeError(f"{len(ordered)} problems with the {what}\n  {lines}")


def describe(error: ValidationError, model: type[BaseModel], data: Any) -> list[tuple[Key, str]]:
    """What a validation error says of `data`, in words of the recipe.

    Args:
        error: Raised by `model`.
        data: What was validated, methods as mappings of their name to their options.

    Returns:
        (key, message) of every problem; the failed branches of a choice make one message.
    """
    messages: list[tuple[Key, str]] = []
    needs: dict[Key, list[str]] = {}
    found: dict[Key, str] = {}
    for detail in error.errors(include_url=False):
        key = _written_key(detail["loc"], data)
        if detail["type"] == "extra_forbidden":
            names = _allowed_keys(model, key[:-1])
            messages.append((key, f"unknown key; {suggestion(str(key[-1]), names)}"))
        elif detail["type"] == "missing":
            messages.append(((*key, str(detail["loc"][-1])), "missing; this key is needed"))
        elif detail["type"] in ("value_error", "assertion_error"):
            messages.append((key, str(detail.get("ctx", {})["error"])))
        else:
            needs.setdefault(key, []).append(_need(detail))
            found[key] = _found(detail["input"])
    for key, parts in needs.items():
        # a mapping that fails as one branch of a choice fails inside it: that says more
        if not any(other[: len(key)] == key and len(other) > len(key) for other in needs):
            wanted = " or ".join(dict.fromkeys(parts))
            if wanted == "a mapping" and (names := _allowed_keys(model, key)):
                wanted = f"a mapping of {', '.join(names)}"
            close = _close_literal(error, key, data)
            messages.append((key, f"found {found[key]}; needed is {wanted}{close}"))
    return messages


MISSING = object()
BOUNDS = {  # of numbers, by pydantic's names
    "greater_than": ("a number above", "gt"),
    "greater_than_equal": ("a number of at least", "ge"),
    "less_than": ("a number below", "lt"),
    "less_than_equal": ("a number of at most", "le"),
}


def child(value: Any, part: str | int) -> Any:
    """The value at a mapping's key or a list's index; `MISSING` where there is none."""
    if isinstance(value, dict):
        return value.get(part, MISSING)
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return value[part]
    return MISSING


def _written_key(loc: Sequence[str | int], data: Any) -> Key:
    """The part of pydantic's location that exists in the data: names of union members drop out."""
    key: list[str | int] = []
    for part in loc:
        inner = child(data, part)
        if inner is not MISSING:
            data = inner
            key.append(part)
    return tuple(key)


def _need(detail: ErrorDetails) -> str:
    named = {
        "model_type": "a mapping",
        "model_attributes_type": "a mapping",
        "dict_type": "a mapping",
        "tuple_type": "a list",
        "list_type": "a list",
        "string_type": "text",
        "path_type": "a path",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
    }
    for kind, (word, bound) in BOUNDS.items():
        if detail["type"] == kind:
            return f"{word} {detail.get('ctx', {})[bound]:g}"
    if detail["type"] == "too_short":
        return f"{detail.get('ctx', {})['min_length']} or more"
    text = named.get(detail["type"], detail["msg"])
    return text.removeprefix("Input should be ").removeprefix("a value ")


def _found(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}"
    if value == []:
        return "an empty list"
    return {dict: "a mapping", list: "a list"}.get(type(value), f"{value!r}")


def _close_literal(error: ValidationError, key: Key, data: Any) -> str:
    """`; did you mean ...?` for text that is close to one of a choice's words."""
    for detail in error.errors(include_url=False):
        if detail["type"] == "literal_error" and _written_key(detail["loc"], data) == key:
            expected = detail.get("ctx", {})["expected"]
            words = re.findall(r"'([^']*)'", expected)
            close = get_close_matches(str(detail["input"]), words, n=1, cutoff=0.5)
            return f"; did you mean {close[0]!r}?" if close else ""
    return ""


def _allowed_keys(model: type[BaseModel], key: Key) -> list[str]:
    """Names of the keys that the mapping at `key` may hold."""
    if len(key) >= 3 and key[0] == "methods":
        names = _properties(METHODS[str(key[2])].model_json_schema(), key[3:])
        return [name for name in names if name != "name"]
    return _properties(model.model_json_schema(), key)


def _properties(schema: dict[str, Any], key: Key) -> list[str]:
    """Property names of the object that a JSON schema has at `key`."""
    nodes = [schema]
    for part in (*key, None):
        nodes = [leaf for node in nodes for leaf in _variants(node, schema.get("$defs", {}))]
        if part is None:
            break
        nodes = [
            node["items"] if isinstance(part, int) else node["properties"][part]
            for node in nodes
            if ("items" if isinstance(part, int) else "properties") in node
            and (isinstance(part, int) or part in node["properties"])
        ]
    return [name for node in nodes for name in node.get("properties", {})]


def _variants(node: dict[str, Any], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    """The schema itself, or the members of a choice, references followed."""
    if "$ref" in node:
        return _variants(definitions[node["$ref"].rpartition("/")[2]], definitions)
    members = node.get("anyOf", node.get("oneOf", node.get("allOf")))
    if members is None:
        return [node]
    return [leaf for member in members for leaf in _variants(member, definitions)]
