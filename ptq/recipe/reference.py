"""The page of every recipe key, from the models themselves, so that it cannot say what is not so.

    python -m ptq.recipe.reference > recipes/KEYS.md

Types, defaults and limits are those of the models' JSON schema; a key's meaning is the docstring
below it in the source.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, get_args

from pydantic.fields import FieldInfo

from formats.scheme import PRESETS, Strict
from ptq.methods.common.spec import MethodSpec
from ptq.recipe import schema
from ptq.recipe.peers import QUANTIZERS, PeerChoice

HEAD = """# Every key of a recipe

Written by `python -m ptq.recipe.reference > recipes/KEYS.md` from the pydantic models of a
recipe; a test compares both. [README.md](README.md) helps to choose a recipe.
"""
LIMITS = {  # of a number, in JSON schema's words and in ours
    "minimum": "from {:g}",
    "exclusiveMinimum": "above {:g}",
    "maximum": "to {:g}",
    "exclusiveMaximum": "below {:g}",
}
FENCE = "```yaml\n"
LARGE = 2**31  # limits beyond are those of storage, and tell a person nothing
KINDS = {
    "integer": "integer",
    "number": "number",
    "boolean": "`true` or `false`",
    "string": "text",
    "null": "`null`",
}


def page() -> str:
    """The whole page as Markdown."""
    names: dict[type[Strict], str] = {}
    for path, model in sections(schema.Recipe):
        names[model] = f"{names[model]}, {path}" if model in names else path
    links = {model.__name__: f"#{anchor(name)}" for model, name in names.items()}
    parts = [HEAD, _prose(schema.__doc__ or "").partition("\n\n")[2]]
    for model, name in names.items():
        parts += [f"## {name}\n\n{_about(model)}"] if name else []
        parts += [_table(model, links), _beside(model)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def anchor(heading: str) -> str:
    """The fragment that leads to a heading of Markdown, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def meanings(model: type[Strict]) -> dict[str, str]:
    """What each field of a model means: the docstring below it, inherited ones included."""
    found: dict[str, str] = {}
    for cls in reversed([c for c in model.__mro__ if issubclass(c, Strict)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name)
                found[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found


def sections(model: type[Strict], path: str = "") -> Iterator[tuple[str, type[Strict]]]:
    """A model and those of its keys, each with where it stands: `report.thresholds`."""
    yield path, model
    for key, field in model.model_fields.items():
        for inner in _models(field.annotation):
            place = f"{path}.{key}" if path else key
            if issubclass(inner, MethodSpec):
                place = f"{place}: {inner.model_fields['name'].default}"
            yield from sections(inner, place)


def _models(annotation: Any) -> Iterator[type[Strict]]:
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _prose(docstring: str) -> str:
    """A docstring as Markdown: examples fenced, what is for programmers left out."""
    text = re.split(r"\n(?:Raises|Attributes|Args):\n", inspect.cleandoc(docstring))[0]
    text = re.sub(
        r"YAML: ``(.*?)``", lambda m: _fenced(" ".join(m[1].split())), text, flags=re.DOTALL
    )
    blocks = text.replace("YAML::\n\n", "").split("\n\n")
    indented = (_fenced(textwrap.dedent(b)) if b.startswith("    ") else b for b in blocks)
    return "\n\n".join(indented)


def _fenced(yaml: str) -> str:
    return f"{FENCE}{yaml}\n```"


def _about(model: type[Strict]) -> str:
    prose = _prose(model.__doc__ or "")
    if not issubclass(model, MethodSpec):
        return prose
    start = prose.index(FENCE) + len(FENCE)
    example = prose[start : prose.index("\n```", start)]
    return prose.replace(example, "methods:\n  - " + example.replace("\n", "\n    "))


def _table(model: type[Strict], links: Mapping[str, str]) -> str:
    """The keys of a model: a row each; empty where it has none but its name."""
    described, rows = meanings(model), []
    properties = model.model_json_schema().get("properties", {})
    for key, field in model.model_fields.items():
        if "const" not in properties[key]:  # the name of a method
            default = "needed" if field.is_required() else _default(field)
            rows.append((f"`{key}`", _kind(properties[key], links), default, described[key]))
    return _markdown(("key", "type", "default", "meaning"), rows) if rows else ""


def _kind(value: Mapping[str, Any], links: Mapping[str, str]) -> str:
    """What a key takes, in words, from its JSON schema."""
    if "$ref" in value:
        return f"[mapping]({links[_name(value['$ref'])]})"
    if "anyOf" in value:
        return " or ".join(_kind(choice, links) for choice in value["anyOf"])
    if "oneOf" in value:
        names = {ref: name for name, ref in value["discriminator"]["mapping"].items()}
        choices = [choice["$ref"] for choice in value["oneOf"]]
        return ", ".join(f"[{names[ref]}]({links[_name(ref)]})" for ref in choices)
    if "const" in value or "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value.get("enum", [value.get("const")]))
    if value["type"] == "array":
        return f"list of {_kind(value['items'], links)}"
    if value["type"] == "object":
        return f"mapping of {_kind(value['additionalProperties'], links)}"
    if value.get("format") == "path":
        return "path"
    limits = [
        text.format(value[word])
        for word, text in LIMITS.items()
        if word in value and value[word] < LARGE
    ]
    return " ".join((KINDS[value["type"]], *limits))


def _name(ref: str) -> str:
    """The model that a reference of a JSON schema leads to."""
    return ref.rpartition("/")[2]


def _default(field: FieldInfo) -> str:
    """A default in YAML; that of a mapping is the defaults of its keys."""
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Strict):
        return "its own"
    return f"`{json.dumps(value)}`".replace('"', "")


def _beside(model: type[Strict]) -> str:
    """What the names stand for that a key may hold instead of a mapping."""
    if model is schema.Scheme:
        return "A preset's name stands for:\n\n" + _presets()
    if model is PeerChoice:
        rows = [
            (f"`{name}`", peer.method, peer.package, "yes" if peer.in_extra else "")
            for name, peer in QUANTIZERS.items()
        ]
        return _markdown(("name", "does", "package", "in the extra `peers`"), rows)
    return ""


def _presets() -> str:
    rows = []
    for name, scheme in PRESETS.items():
        cache = scheme.kv_cache
        parts = (scheme.weights, scheme.activations)
        texts = [part.text if part else "float" for part in parts]
        cached = cache.text if cache else "float"
        rows.append((f"`{name}`", *texts, cached, "int8" if scheme.states else "float"))
    return _markdown(("preset", "weights", "activations", "cache KV", "kept states"), rows)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


if __name__ == "__main__":
    print(page(), end="")
