"""A recipe on its way from text to a checked model: short forms, overrides, paths, problems.

Short forms are names of presets, methods and peers, or true and false:

    scheme: a8w8c8                     # what `formats.scheme.PRESETS` holds under that name, in
                                       # the largest groups that fit each layer
    layers: [{match: [...], scheme: w8}]
    methods: [rtn, {smoothquant: {}}]  # a name, or a mapping of it to its options
    report: {speed: true, peers: [autoround]}

They are replaced by the mappings that they stand for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from calibrate.spec import NOT_READ, TABLES, TEXT
from formats.errors import CheckpointError, suggestion
from formats.families.registry import find_family, is_causal_lm, unsupported
from formats.gguf.locate import is_gguf
from formats.hub import find_model, is_hub_id, near_folder
from formats.namespace import later
from formats.scheme import PRESETS
from formats.stored.folder import read_config
from ptq.methods.registry import METHODS
from ptq.recipe.problems import MISSING, Faults, Where, child, describe, recipe_error
from ptq.recipe.strict_yaml import Document, Key, Origin, Problem, parse

with later():
    from formats.adapters import settings as adapters

M = TypeVar("M", bound=BaseModel)
PATHS = (
    ("model", "path"),
    ("model", "adapter"),
    ("output", "path"),
    ("dataset", "name"),
    ("dataset", "evaluation_name"),
)


class Override(str):
    """`key.key=value` for a recipe, and how a person gave it where that was not `--set`."""

    given: str

    def __new__(cls, text: str, given: str) -> Override:
        """Both as text."""
        made = super().__new__(cls, text)
        made.given = given
        return made


@dataclass
class Draft(Document):
    """A recipe being read: the document that it is in, with what was laid over it.

    Attributes:
        unusable: Problems of short forms that stand for nothing.
    """

    unusable: list[Problem] = field(default_factory=list)

    def at(self, key: Key, message: str) -> Problem:
        """A problem of the value at `key`."""
        return Problem(Where(self.origins)(key), key, message)

    def expand(self) -> list[Problem]:
        """Replace the short forms; problems of those that stand for nothing."""
        return [self.at(key, message) for key, message in expand(self.data)]

    def override(self, text: str) -> None:
        """Apply one `key.key=value`."""
        origin = Origin(text.given if isinstance(text, Override) else f"--set {text}")
        name, equals, value = text.partition("=")
        document = parse(value)
        if not equals or not name or document.problems:
            why = document.problems[0].message if document.problems else "found no key=value"
            self.problems.append(Problem(origin, (), f"{why}; write --set key.key=value"))
            return
        key: Key = ()
        parent: Any = self.data
        *path, last = name.split(".")
        for part in path:
            key = (*key, _index(parent, part))
            inner = child(parent, key[-1])
            if isinstance(parent, dict) and (inner is MISSING or inner is None):
                inner = parent[part] = {}
                self.origins[key] = origin
            if not isinstance(inner, dict | list):
                message = "no such item" if inner is MISSING else f"holds {inner!r}, not a mapping"
                self.problems.append(Problem(origin, key, message))
                return
            parent = inner
        key = (*key, _index(parent, last))
        outside = isinstance(parent, list) and child(parent, key[-1]) is MISSING
        if outside:
            message = f"no such item; needed is an index from 0 to {len(parent) - 1}"
            self.problems.append(Problem(origin, key, message))
            return
        _put(parent, key[-1], document.data)
        self.origins = {k: v for k, v in self.origins.items() if k[: len(key)] != key}
        self.origins |= {(*key, *inner): origin for inner in ((), *document.origins)}

    def anchor_paths(self, folder: Path) -> None:
        """Make paths absolute: from the recipe's folder, or as typed from the current directory."""
        for key in PATHS:
            section = self.data.get(key[0])
            value = section.get(key[1]) if isinstance(section, dict) else None
            typed = key[0] == "output" or not Where(self.origins)(key).line
            base = Path.cwd() if typed else folder
            if not isinstance(value, str) or (key[0] == "dataset" and not _is_file(base, value)):
                continue
            found = find_model(value, base) if key[0] == "model" else None
            if found is None and key[0] == "model" and is_hub_id(value):
                continue  # a name on the hub
            section[key[1]] = os.path.normpath(found or base / os.path.expanduser(value))
        for i, item in enumerate(peers_of(self.data)):
            key = ("report", "peers", i, "python")
            if isinstance(item, dict) and isinstance(item.get("python"), str):
                base = folder if Where(self.origins)(key).line else Path.cwd()
                item["python"] = os.path.normpath(base / os.path.expanduser(item["python"]))

    def check_model(self) -> None:
        """Note a problem where the model's folder is none, or has a revision; or its adapter."""
        model = self.data.get("model")
        path = model.get("path") if isinstance(model, dict) else None
        self._check_adapter(model.get("adapter") if isinstance(model, dict) else None)
        if not isinstance(model, dict) or not isinstance(path, str) or is_hub_id(path):
            return
        if model.get("revision") is not None:
            message = f"found a revision, but {path} is a local folder, which has none"
            self.problems.append(self.at(("model", "revision"), message))
        if is_gguf(path):
            return  # it says what it is when it is read
        fault = _unsupported(Path(path)) if Path(path).is_dir() else self._no_model(Path(path))
        if fault is not None:
            self.problems.append(self.at(("model", "path"), fault))

    def _check_adapter(self, path: Any) -> None:
        """Note a problem where a folder is that of no adapter which can be merged."""
        if not isinstance(path, str) or is_hub_id(path):
            return
        try:
            adapters.read_lora_settings(adapters.adapter_folder(path))
        except CheckpointError as error:
            self.problems.append(self.at(("model", "adapter"), str(error)))

    def _no_model(self, path: Path) -> str:
        if path.is_file():
            return f"{path} is a file; give the folder that it is in, or a .gguf file"
        written = Where(self.origins)(("model", "path")).line
        start = "in a recipe are relative to its own folder"
        start = start if written else "that are typed are relative to the current directory"
        near = near_folder(path).strip()
        return f"no such folder: {path}. Paths {start}{'; ' if near else ''}{near}"

    def laid_over(self, base: Draft) -> Draft:
        """What this one says over what `base` says; the origin of each value is kept."""
        origins = dict(base.origins)

        def merge(key: Key, low: Any, high: Any) -> Any:
            if isinstance(low, dict) and isinstance(high, dict):
                merged = {k: merge((*key, k), low.get(k, MISSING), v) for k, v in high.items()}
                return low | merged
            if low is not MISSING:
                for known in [k for k in origins if k[: len(key)] == key]:
                    del origins[known]
            return high

        data = merge((), base.data, self.data)
        return Draft(data, origins | self.origins, [*base.problems, *self.problems])

    def validate(self, model: type[M]) -> M:
        """The checked model of the data.

        Raises:
            RecipeError: with all problems noted so far and those found now.
        """
        result, problems = None, [*self.problems, *self.unusable]
        reported = {p.key for p in self.unusable}
        reported |= {p.key for p in self.problems if p.key and self._value(p.key) is None}
        data = self.data | {"methods": tagged(self.data.setdefault("methods", []))}
        try:
            result = model.model_validate_json(json.dumps(data))
        except ValidationError as error:
            found = describe(error, model, self.data)
            problems += [
                self.at(key, message)
                for key, message in found
                if not any(key[:n] in reported for n in range(1, len(key) + 1))
            ]
        if problems or result is None:
            raise recipe_error(problems)
        return result

    def _value(self, key: Key) -> Any:
        value = self.data
        for part in key:
            value = child(value, part)
        return None if value is MISSING else value


def _put(parent: Any, key: str | int, value: Any) -> None:
    parent[key] = value


def _index(parent: Any, part: str) -> str | int:
    """A part of an override's key: an index where its parent is a list."""
    return int(part) if isinstance(parent, list) and part.isdecimal() else part


def _is_file(base: Path, name: str) -> bool:
    """Whether a dataset's name means something on this machine's disk."""
    if name == "stdlib":
        return False
    suffixes = (*TEXT, *TABLES, *NOT_READ)
    looks_local = Path(name).suffix in suffixes or name.startswith((".", "/", "~"))
    return looks_local or (base / name).exists()


def _unsupported(model: Path) -> str | None:
    """Why a folder's model is of no family that is run here; None where it is, or unknown."""
    try:
        config = read_config(model)[0]
    except CheckpointError:
        return None  # the plan opens it, and tells
    runs = find_family(config) is not None or is_causal_lm(config)
    return None if runs else unsupported(config, str(model))


OPTIONAL = ("speed", "attribution")  # of the report: mappings, or false


def expand(data: dict[str, Any]) -> Faults:
    """Replace short forms in a recipe's data.

    Yields:
        Key and message of each value that stands for nothing; it is left as it is.
    """
    if data.get("budget") is not None and "base" not in data:
        data.setdefault("scheme", "w4")
        data.setdefault("methods", [{"two_sided": {"sweeps": 2}}])
    scheme: Any = data.get("scheme")
    methods: Any = data.get("methods")
    report: Any = data.get("report")
    if isinstance(scheme, str):
        if scheme in PRESETS:
            data["scheme"] = PRESETS[scheme].opened.model_dump(mode="json")
        else:
            yield ("scheme",), _unknown_scheme(scheme, list(PRESETS))
    yield from _expand_layers(data.get("layers"))
    for i, item in enumerate(methods if isinstance(methods, list) else ()):
        methods[i] = item = {item: {}} if isinstance(item, str) else item
        message = _method_problem(item)
        if message:
            yield ("methods", i), message
        elif None in item.values():
            methods[i] = {name: {} for name in item}
    for key in OPTIONAL if isinstance(report, dict) else ():
        if isinstance(report.get(key), bool):
            report[key] = {} if report[key] else None
    for i, item in enumerate(peers := peers_of(data)):
        peers[i] = {"name": item} if isinstance(item, str) else item


def peers_of(data: dict[str, Any]) -> list[Any]:
    """The list of peers that a recipe's data hold."""
    peers = child(data.get("report"), "peers")
    return peers if isinstance(peers, list) else []


def tagged(methods: Any) -> Any:
    """Methods with their name among their options, where the model wants it."""
    if not isinstance(methods, list):
        return methods
    return [item if _method_problem(item) else _tagged_method(item) for item in methods]


def _tagged_method(item: dict[str, Any]) -> dict[str, Any]:
    ((name, options),) = item.items()
    return {"name": name, **(options or {})}


def _expand_layers(layers: Any) -> Faults:
    """Presets of single layers, without cache and states, of which they have none of their own."""
    for i, entry in enumerate(layers if isinstance(layers, list) else ()):
        scheme, key = child(entry, "scheme"), ("layers", i, "scheme")
        if isinstance(scheme, str) and scheme in PRESETS:
            entry["scheme"] = scheme = PRESETS[scheme].opened.model_dump(mode="json")
            if scheme["kv_cache"] is None:
                del scheme["kv_cache"]
        elif isinstance(scheme, str):
            found = PRESETS.items()
            plain = [name for name, own in found if own.kv_cache is None and own.states is None]
            yield key, _unknown_scheme(scheme, plain)
        for part, what in (("kv_cache", "a cache"), ("states", "kept states")):
            if isinstance(scheme, dict) and part in scheme:
                yield (
                    (*key, part),
                    f"found {what} in the scheme of single layers; there is one scheme of that in "
                    "the whole model: give it under scheme, and leave it out here",
                )


def _unknown_scheme(name: str, presets: Sequence[str]) -> str:
    """A message about a scheme's name; W8A8 and W4A16, as others write them, are understood."""
    bits = dict(re.findall(r"([wac])(\d+)", name.lower().replace("kv", "c")))
    ours = "".join(f"{kind}{bits[kind]}" for kind in "awc" if bits.get(kind, "16") != "16")
    if ours in presets:
        return f"unknown scheme {name!r}; did you mean {ours!r}? allowed: {', '.join(presets)}"
    return f"unknown scheme {name!r}; {suggestion(name.lower(), presets)}"


def _method_problem(item: Any) -> str | None:
    """What is wrong with an item of `methods`, its options aside."""
    allowed = ", ".join(METHODS)
    if not isinstance(item, dict) or len(item) != 1:
        keys = list(item) if isinstance(item, dict) else []
        found = f"found {' and '.join(map(repr, keys))}; " if keys else ""
        needed = "needed is the name of one method, or `name: options`"
        stray = next((str(key) for key in keys if key not in METHODS), None)
        return f"{found}{needed}; {suggestion(stray, METHODS) if stray else f'allowed: {allowed}'}"
    name, options = next(iter(item.items()))
    if name not in METHODS:
        return f"unknown method {name!r}; {suggestion(name, METHODS)}"
    if not isinstance(options, dict | None):
        return f"found {options!r}; needed are options of {name} as a mapping"
    if options and "name" in options:
        return f"unknown key 'name' in the options of {name}"
    return None
