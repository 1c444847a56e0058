"""YAML as people mean it: each key once, no surprises of type, every value with its line.

PyYAML's safe loader follows YAML 1.1, where `1e-2` is text, `on` is a truth value, `010` is eight
and a repeated key silently wins. Here scalars follow the core schema of YAML 1.2.2 (section
10.3.2): `true` and `false`, decimal, `0o` and `0x` integers, floats with or without a point, `null`
and `~`; all else is text. `.inf` and `.nan` are text too, as no setting can use them. Anchors,
aliases and merge keys (`<<`) work; tags do not, so nothing of a file is ever executed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml
from yaml.constructor import ConstructorError

Key = tuple[str | int, ...]  # where a value is: names of mapping keys and indices into lists

MOST_VALUES = 10_000  # far above any recipe; stops aliases that multiply each other
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?$|^[-+]?[0-9]+[eE][-+]?[0-9]+$"
)
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:null|Null|NULL|~|)$")
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null")}


class Origin(NamedTuple):
    """Where a value was written: a line of a file, or (line 0) an override or a program."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class Problem(NamedTuple):
    """One thing that is wrong: with the value of a key, or, where that is (), with all of it."""

    origin: Origin
    key: Key
    message: str

    def __str__(self) -> str:
        key = ".".join(map(str, self.key))
        said = self.origin.source.startswith(f"--set {key}=")
        return ": ".join([str(self.origin), *([key] if key and not said else []), self.message])


@dataclass
class Document:
    """A parsed document.

    Attributes:
        data: Mappings, lists and scalars; None where the text could not be parsed or is empty.
        origins: Where every value was written, by its key; lines count from 1.
        problems: Everything wrong with it, in the order of its lines.
    """

    data: Any
    origins: dict[Key, Origin]
    problems: list[Problem]


class _Loader(yaml.SafeLoader):
    """Safe loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (PyYAML's own interface)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that also quotes text which `_Loader` would read as a number."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_CORE = (
    ("bool", _BOOL, "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", _NULL, ["~", "n", "N", ""]),
    ("merge", re.compile("^<<$"), "<"),
)
for _kind, _pattern, _first in _CORE:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, list(_first))


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text[2:] if base != 10 else text, base)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(node.value))


def parse(text: str, source: str = "") -> Document:
    """Parse one YAML document, collecting everything that is wrong with it.

    Args:
        source: Where the text is from, for origins.
    """
    start = Origin(source, 1)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        line, message = _syntax_fault(error, text)
        return Document(None, {(): start}, [Problem(Origin(source, line), (), message)])
    except RecursionError:
        message = "not a recipe: nested too deeply"
        return Document(None, {(): start}, [Problem(start, (), message)])
    reader = _Reader(loader, source)
    data = reader.read(node, ()) if node is not None else None
    problems = sorted(reader.problems, key=lambda problem: problem.origin.line)
    return Document(data, reader.origins or {(): start}, problems)


def dump(data: object) -> str:
    """Write data so that `parse` reads the same values back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def override_value(value: object) -> str:
    """A value as `--set key=value` takes it: text as it stands where that reads as the same text.

    A column named `null` or `2024` needs quotes there, a path does not.
    """
    if isinstance(value, str) and parse(value).data == value:
        return value
    return json.dumps(value)


HINTS = {  # what the parser's messages mean
    "'\\t'": "; indent with spaces, not with tabs",
    "mapping values": "; a key needs a space after its colon: look at the line before, too",
    "quoted scalar": "; the quote that opens here is not closed",
}


def _syntax_fault(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    """The line of a fault, and what it is."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        message = " ".join(part for part in (error.context, error.problem) if part)
        hint = next((hint for found, hint in HINTS.items() if found in message), "")
        opened = error.context_mark if "quoted" in message else None
        line = (opened or error.problem_mark).line + 1
        return line, f"not valid YAML: {message}{hint}"
    position, reason = getattr(error, "position", 0), getattr(error, "reason", "cannot be read")
    return text.count("\n", 0, position) + 1, f"not valid YAML: {reason}"


class _Reader:
    """Turns nodes into values, noting origins and problems."""

    def __init__(self, loader: yaml.SafeLoader, source: str) -> None:
        self.loader, self.source = loader, source
        self.origins: dict[Key, Origin] = {}
        self.problems: list[Problem] = []
        self.open: set[int] = set()
        self.values = 0

    def read(self, node: yaml.Node, key: Key) -> Any:
        """The value of a node; None in place of what is at fault."""
        line = node.start_mark.line + 1
        self.origins.setdefault(key, Origin(self.source, line))
        self.values += 1
        if self.values > MOST_VALUES:
            if self.values == MOST_VALUES + 1:
                self._fault(line, key, f"more than {MOST_VALUES} values once aliases are followed")
            return None
        if id(node) in self.open:
            return self._fault(line, key, "an anchor contains an alias of itself")
        self.open.add(id(node))
        try:
            return self._value(node, key, line)
        finally:
            self.open.remove(id(node))

    def _value(self, node: yaml.Node, key: Key, line: int) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.read(item, (*key, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in _PLAIN_TAGS:
            return self._scalar(node, key, line)
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        return self._fault(line, key, f"tag {tag} is not allowed; write plain values")

    def _scalar(self, node: yaml.ScalarNode, key: Key, line: int) -> Any:
        try:
            return self.loader.construct_object(node)
        except (ValueError, KeyError, ConstructorError):  # an explicit tag on other text
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            return self._fault(line, key, f"{node.value!r} is not a value of tag {tag}")

    def _mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        own: dict[str, tuple[int, yaml.Node]] = {}
        result: dict[str, Any] = {}
        for name, value in node.value:
            line = name.start_mark.line + 1
            if name.tag == "tag:yaml.org,2002:merge":
                result |= self._merge(value, key)
            elif not isinstance(name, yaml.ScalarNode) or name.tag != "tag:yaml.org,2002:str":
                found = name.value if isinstance(name, yaml.ScalarNode) else "of a mapping or list"
                self._fault(line, key, f"key {found} is not text; quote it or rename it")
            elif name.value in own:
                message = f"duplicate key; line {own[name.value][0]} has it already. Keep one"
                self._fault(line, (*key, name.value), message)
            else:
                own[name.value] = (line, value)
        for text, (line, value) in own.items():
            path = (*key, text)
            self.origins = {k: v for k, v in self.origins.items() if k[: len(path)] != path}
            self.origins[path] = Origin(self.source, line)
            result[text] = self.read(value, path)
        return result

    def _merge(self, node: yaml.Node, key: Key) -> dict[str, Any]:
        """What a merge key (`<<`) lends to its mapping: of a list, earlier mappings win."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        lent: dict[str, Any] = {}
        for source in reversed(sources):
            if not isinstance(source, yaml.MappingNode):
                self._fault(source.start_mark.line + 1, key, "`<<` takes mappings only")
                continue
            lent |= self.read(source, key) or {}  # None: an anchor inside itself, noted
        return lent

    def _fault(self, line: int, key: Key, message: str) -> None:
        """Note a fault; the value in its place is None."""
        self.problems.append(Problem(Origin(self.source, line), key, message))
