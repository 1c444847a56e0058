"""Short forms of a recipe's values: names of presets, methods and peers; true or false.

    scheme: a8w8c8                     # what `formats.scheme.PRESETS` holds under that name, in
                                       # the largest groups that fit each layer
    layers: [{match: [...], scheme: w8}]
    methods: [rtn, {smoothquant: {}}]  # a name, or a mapping of it to its options
    report: {speed: true, peers: [autoround]}

They are replaced by the mappings that they stand for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from formats.errors import suggestion
from formats.scheme import PRESETS
from ptq.methods.registry import METHODS
from ptq.recipe.problems import child
from ptq.recipe.strict_yaml import Key

OPTIONAL = ("speed", "attribution")  # of the report: mappings, or false


def expand(data: dict[str, Any]) -> Iterator[tuple[Key, str]]:
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


def _expand_layers(layers: Any) -> Iterator[tuple[Key, str]]:
    """Presets of single layers, without the cache, of which they have none of their own."""
    for i, entry in enumerate(layers if isinstance(layers, list) else ()):
        scheme, key = child(entry, "scheme"), ("layers", i, "scheme")
        if isinstance(scheme, str) and scheme in PRESETS:
            entry["scheme"] = scheme = PRESETS[scheme].opened.model_dump(mode="json")
            if scheme["kv_cache"] is None:
                del scheme["kv_cache"]
        elif isinstance(scheme, str):
            plain = [name for name, preset in PRESETS.items() if preset.kv_cache is None]
            yield key, _unknown_scheme(scheme, plain)
        if isinstance(scheme, dict) and "kv_cache" in scheme:
            yield (
                (*key, "kv_cache"),
                "found a cache in the scheme of single layers; it has one scheme in the whole "
                "model: give it under scheme, and leave it out here",
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
