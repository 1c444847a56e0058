"""Reading a recipe: its bases laid under it, overrides over it, and all that is wrong with it.

A loaded recipe holds absolute paths and every default (`ptq.recipe.schema` tells which is relative
to what); written out again, it repeats the run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from formats.errors import RecipeError, suggestion
from ptq.recipe.draft import OPTIONAL, Draft, Override
from ptq.recipe.own_model import find_recipe, shipped_paths
from ptq.recipe.problems import Where, recipe_error
from ptq.recipe.schema import Recipe
from ptq.recipe.strict_yaml import dump, parse

FEW = 30  # files in a folder that a message lists
RESOLVED = "# Every setting of a run, defaults included: `ptq run` on this file repeats it.\n"


def resolved_yaml(recipe: Recipe) -> str:
    """The recipe as YAML with every default spelled out; loading it gives an equal recipe."""
    data: dict[str, Any] = recipe.model_dump(mode="json")
    data["methods"] = [{options.pop("name"): options} for options in data["methods"]]
    for key in OPTIONAL:
        data["report"][key] = data["report"][key] or False
    if not recipe.layers:
        del data["layers"]
    if recipe.budget is None:
        del data["budget"]
    for key in ("revision", "adapter"):
        if data["model"][key] is None:
            del data["model"][key]
    return RESOLVED + dump(data)


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and where each of its values was written, for messages."""

    recipe: Recipe
    where: Where

    def pinned(self) -> LoadedRecipe:
        """The same with the model for good, downloaded if it is on the hub: before heavy imports.

        Raises:
            CheckpointError: there is no such model, or it cannot be had.
        """
        model = self.recipe.model.pinned()
        return LoadedRecipe(self.recipe.model_copy(update={"model": model}), self.where)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe; `read_recipe` without the origins."""
    return read_recipe(path, overrides).recipe


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read, override and check a recipe.

    Args:
        path: The YAML file, or a shipped recipe's name.
        overrides: `key.key=value` each, the value in YAML; list items by their index from 0.

    Raises:
        RecipeError: tells everything that is wrong, each with its line or override, its key, what
            was found and what is allowed.
    """
    path = find_recipe(path)
    draft = _read_draft(path, ())
    if not isinstance(draft.data, dict):
        empty = draft.at((), "found no keys; a recipe needs model, scheme and output")
        raise recipe_error(draft.problems or [empty])
    draft.unusable = draft.expand()
    for text in overrides:
        draft.override(text)
        draft.unusable = draft.expand()  # the next may go into what a name stands for
    draft.anchor_paths(path.absolute().parent)
    draft.check_model()
    return LoadedRecipe(draft.validate(Recipe), Where(draft.origins))


def output_override(output: str | Path | None) -> list[str]:
    """The override that gives a recipe another output folder; none for None."""
    if output is None:
        return []
    return [Override(f"output.path={json.dumps(str(output))}", f"--output {output}")]


def _read_draft(path: Path, above: tuple[Path, ...]) -> Draft:
    """A file as it stands, laid over its base, if it names one."""
    document = parse(_read_text(path), str(path))
    draft = Draft(document.data, document.origins, document.problems)
    if not isinstance(draft.data, dict):
        return draft
    if above:  # a base: its paths are relative to its own folder
        draft.anchor_paths(path.absolute().parent)
    if above or "base" in draft.data:
        draft.expand()
    if "base" not in draft.data:
        return draft
    base = draft.data.pop("base")
    if not isinstance(base, str):
        message = f"found {base!r}; needed is the path of another recipe, or a shipped one's name"
        draft.problems.append(draft.at(("base",), message))
        return draft
    under = find_recipe(base, path.parent)
    chain = (*above, path.resolve())
    if under.resolve() in chain:
        circle = " -> ".join(p.name for p in (*chain, under))
        raise recipe_error([draft.at(("base",), f"the bases go in a circle: {circle}")])
    if not under.is_file():
        raise recipe_error([draft.at(("base",), f"no such recipe: {base}{_near(under)}")])
    lower = _read_draft(under, chain)
    return draft.laid_over(lower) if isinstance(lower.data, dict) else draft


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"{path}:{line}: not UTF-8 text (byte {error.start}); save the recipe as UTF-8"
        ) from error
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}){_near(path)}") from error


def _near(path: Path) -> str:
    """What may have been meant by a path that is no file, and no shipped recipe's name."""
    if path.is_dir():
        inside = sorted(path.glob("*.yaml"))
        return f"; did you mean {inside[0]}?" if inside else "; a recipe is a file"
    shipped = shipped_paths()
    if path.suffix != ".yaml":
        return f", and no shipped recipe is called so; {suggestion(path.name, shipped)}"
    if path.stem in shipped:
        return f"; a shipped recipe goes by its name: {path.stem}"
    beside = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    if len(beside) > FEW:
        close = get_close_matches(path.name, beside, n=1)
        return f"; did you mean {close[0]!r}?" if close else ""
    return f"; {suggestion(path.name, beside)}" if beside else "; `ptq recipes` lists those shipped"
