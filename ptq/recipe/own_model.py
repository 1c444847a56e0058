"""A shipped recipe for a model of one's own: what to put into it, from a few words.

The recipes that come with the project: found by name wherever it is installed, and listed.

A recipe's name is its file's, such as `a8w8c8` or `peers/w4_gptq`. What a recipe is for stands in
the first line of its file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from formats.errors import RecipeError, suggestion
from formats.namespace import ROOT, later
from formats.scheme import PRESETS, Scheme
from ptq.recipe.draft import Override
from ptq.recipe.strict_yaml import override_value, parse

with later():
    from calibrate import sources


# What users call a scheme, and the shipped recipe that does best by it without taking hours.
SCHEMES = {
    "w4": "w4_gptq",
    "w8": "w8_rtn",
    "a8w8": "a8w8",
    "a8w8_dynamic": "a8w8_dynamic",
    "a8w8c8": "a8w8c8",
    "w4c8": "w4c8",
    "a8w4": "a8w4",
    "a8w4c8": "a8w4c8",
    "fp8": "fp8_channel",
    "fp8_c8": "a8w8c8_fp8",
    "c8": "c8",
}
PRESETS_OF = {"fp8": "fp8_channel"}  # where its name is another
OTHER_NAMES = {"w4a16": "w4", "int4": "w4", "w8a16": "w8", "w8a8": "a8w8", "w4a8": "a8w4"}


def recipe_of(scheme: str) -> str:
    """The shipped recipe for a scheme.

    Raises:
        RecipeError: there is no such scheme.
    """
    name = OTHER_NAMES.get(scheme.lower(), scheme.lower())
    if name in SCHEMES:
        return SCHEMES[name]
    if name in shipped_paths():
        raise RecipeError(f"no scheme {scheme!r}: it is a recipe; give it as such, --recipe {name}")
    if name in PRESETS:
        other = "c8" if PRESETS[name].weights is None else "w4_two_sided"
        raise RecipeError(
            f"no recipe comes with the scheme {scheme!r}; give it to one whose methods fit: "
            f"--recipe {other} --set scheme={name}"
        )
    raise RecipeError(f"no scheme {scheme!r}; {suggestion(name, [*SCHEMES, *OTHER_NAMES])}")


def preset_of(scheme: str) -> str:
    """Name of the preset that a scheme stands for: `fp8_channel` for `fp8`.

    Raises:
        RecipeError: there is no such scheme.
    """
    recipe_of(scheme)
    name = OTHER_NAMES.get(scheme.lower(), scheme.lower())
    return PRESETS_OF.get(name, name)


NAMED = {"model.path": "model", "dataset.name": "data"}  # as one gives them without a recipe


def settings_for(
    model: str | Path | None,
    *,
    data: str | Path | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    given: Sequence[str] = (),
) -> list[str]:
    """What to override in a shipped recipe, so that it quantizes this model on this text.

    Args:
        model: A folder, or its name on the hub; default the recipe's.
        data: Text to calibrate on and to evaluate with: a file, a folder or a name that `datasets`
            knows; half of its documents serve each. Default the recipe's.
        revision: Branch, tag or commit of a model on the hub.
        adapter: Folder of a LoRA adapter to merge in first, or its name on the hub.
        given: Overrides of the user's own, which go over these.

    Returns:
        `key.key=value` each, the value in YAML.

    Raises:
        RecipeError: it is not clear which column of a table to read.
    """
    settings = {"model.path": str(model)} if model is not None else {}
    settings |= {"model.revision": revision} if revision is not None else {}
    settings |= {"model.adapter": str(adapter)} if adapter is not None else {}
    settings |= {"dataset.name": str(data)} if data is not None else {}
    asked = any(text.startswith(("dataset.column", "dataset.messages_column")) for text in given)
    if data is not None and not asked and (path := Path(os.path.expanduser(data))).exists():
        columns = sources.guess_columns(path)
        settings |= {f"dataset.{key}": column for key, column in columns.items()}
    written: list[str] = [
        Override(f"{key}={override_value(value)}", f"{NAMED.get(key, key)} {value}")
        for key, value in settings.items()
    ]
    if data is not None and not any(text.startswith("dataset.fewer=") for text in given):
        written.append("dataset.fewer=true")  # half of a small file may hold less than is asked for
    return [*written, *given]


def default_output(model: str | Path, label: str) -> Path:
    """Where a run goes if nothing is said: `output/MODEL-LABEL`, by the last part of its name."""
    name, of = Path(label), Path(model).name or Path(model).resolve().name
    return Path("output") / f"{of}-{name.stem if name.suffix in ('.yaml', '.yml') else name.name}"


# Beside this package, in a checkout as in site-packages: not imported, so that another project's
# package of the name `recipes` is not in the way.
FOLDER = ROOT / "recipes"


class ShippedRecipe(NamedTuple):
    """What a list of recipes tells of one: its scheme as the file names it, and what it is for."""

    name: str
    scheme: str
    purpose: str
    path: Path


@cache  # they are part of the installation
def shipped_paths() -> Mapping[str, Path]:
    """Files of the shipped recipes by name, those of folders after the others."""
    files = [*sorted(FOLDER.glob("*.yaml")), *sorted(FOLDER.glob("*/*.yaml"))]
    return {file.relative_to(FOLDER).with_suffix("").as_posix(): file for file in files}


def find_recipe(name: str | Path, folder: Path = Path()) -> Path:
    """The file that a path, from `folder` on, or else the name of a shipped recipe stands for.

    A file that exists wins over a name. What is neither is given back as a path.
    """
    path = folder / os.path.expanduser(name)
    return path if path.is_file() else shipped_paths().get(Path(name).as_posix(), path)


def is_shipped(name: str | Path) -> bool:
    """Whether the name, or the path, of a recipe is that of a shipped one."""
    return find_recipe(name).resolve() in shipped_paths().values()


def shipped_recipes() -> list[ShippedRecipe]:
    """All shipped recipes, as their files tell of themselves."""
    return [
        ShippedRecipe(name, _scheme(path), text.partition("\n")[0].removeprefix("# "), path)
        for name, path in shipped_paths().items()
        for text in (path.read_text(encoding="utf-8"),)
    ]


def _scheme(path: Path) -> str:
    """The scheme of a recipe, or of its base: a preset's name, or its short name."""
    data: dict[str, Any] = parse(path.read_text(encoding="utf-8")).data
    if "scheme" not in data:
        return _scheme(find_recipe(data["base"], path.parent))
    scheme = data["scheme"]
    return scheme if isinstance(scheme, str) else Scheme.model_validate(scheme).wac
