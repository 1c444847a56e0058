"""The recipes that come with the project: found by name wherever it is installed, and listed.

A recipe's name is its file's, such as `a8w8c8` or `peers/w4_gptq`. What a recipe is for stands in
the first line of its file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from formats.namespace import ROOT
from formats.scheme import Scheme
from ptq.recipe.strict_yaml import parse

# Beside this package, in a checkout as in site-packages: not imported, so that another project's
# package of the name `recipes` is not in the way.
FOLDER = ROOT / "recipes"


class ShippedRecipe(NamedTuple):
    """What a list of recipes tells of one: its scheme as the file names it, and what it is for."""

    name: str
    scheme: str
    purpose: str
    path: Path


def shipped_paths() -> dict[str, Path]:
    """Files of the shipped recipes by name, those of folders after the others."""
    files = [*sorted(FOLDER.glob("*.yaml")), *sorted(FOLDER.glob("*/*.yaml"))]
    return {file.relative_to(FOLDER).with_suffix("").as_posix(): file for file in files}


def find_recipe(name: str | Path, folder: Path = Path()) -> Path:
    """The file that a path, from `folder` on, or else the name of a shipped recipe stands for.

    A file that exists wins over a name. What is neither is given back as a path.
    """
    path = folder / name
    return path if path.is_file() else shipped_paths().get(Path(name).as_posix(), path)


def is_shipped(name: str | Path) -> bool:
    """Whether the name, or the path, of a recipe is that of a shipped one."""
    return find_recipe(name).resolve() in shipped_paths().values()


def shipped_recipes() -> list[ShippedRecipe]:
    """All shipped recipes, as their files tell of themselves."""
    return [
        ShippedRecipe(name, _scheme(path), _purpose(path), path)
        for name, path in shipped_paths().items()
    ]


def _purpose(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _scheme(path: Path) -> str:
    """The scheme of a recipe, or of its base: a preset's name, or its short name."""
    data: dict[str, Any] = parse(path.read_text(encoding="utf-8")).data
    if "scheme" not in data:
        return _scheme(find_recipe(data["base"], path.parent))
    scheme = data["scheme"]
    return scheme if isinstance(scheme, str) else Scheme.model_validate(scheme).wac
