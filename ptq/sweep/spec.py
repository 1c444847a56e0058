"""The file of a sweep: which recipes run on which models, and what each needs.

    models:
      - tiny-python                       # a folder, a shipped model, or one of the hub
      - {path: /models/mine, name: mine}
    recipes:
      - w8_rtn                            # a shipped recipe, or a file
      - {recipe: w4_gptq, name: gptq_64, set: [methods.0.gptq.damp=0.05], resources: {cpus: 4}}
    set: [dataset.calibration.samples=64] # for every task, as `--set` of `ptq run`
    resources: {cpus: 2, gpus: 0}         # of each task
    output: output/sweep

Paths of models and recipes are relative to the file, that of the output to the current directory.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from formats.errors import RecipeError
from formats.strict import Strict
from ptq.recipe.problems import Origin, Problem, Where, describe, recipe_error
from ptq.recipe.strict_yaml import parse

NAME = re.compile(r"\w[\w.-]*")


class Resources(Strict):
    """What a task occupies while it runs.

    Attributes:
        cpus: Cores, which is as many threads as it has.
        gpus: GPUs; with 0 it sees none.
    """

    cpus: int = Field(default=1, ge=1)
    gpus: int = Field(default=0, ge=0)


def _named(value: Any, name: str | None) -> str:
    """What an entry is called: the name that it gives, or the last part of its path."""
    return name if name is not None else Path(value).name.removesuffix(".yaml")


class ModelEntry(Strict):
    """A model of a sweep.

    Attributes:
        path: Folder, shipped model, or `organization/model` of the hub.
        name: Of its folder in the output; default: the last part of its path.
    """

    path: str = Field(min_length=1)
    name: str | None = None

    @property
    def label(self) -> str:
        """What it is called."""
        return _named(self.path, self.name)


class RecipeEntry(Strict):
    """A recipe of a sweep.

    Attributes:
        recipe: Name of a shipped recipe, or a file.
        name: Of its runs' folders; default: the recipe's.
        set: `key.key=value` each, after those of the sweep.
        resources: In the place of the sweep's.
    """

    recipe: str = Field(min_length=1)
    name: str | None = None
    set: tuple[str, ...] = ()
    resources: Resources | None = None

    @property
    def label(self) -> str:
        """What it is called."""
        return _named(self.recipe, self.name)


class SweepSpec(Strict):
    """The file of a sweep; see the module's docstring.

    Attributes:
        models: Each is run with every recipe.
        recipes: Each is run on every model.
        set: `key.key=value` of every task.
        resources: Of each task that names none of its own.
        output: Folder of all runs.
    """

    models: tuple[ModelEntry, ...] = Field(min_length=1)
    recipes: tuple[RecipeEntry, ...] = Field(min_length=1)
    set: tuple[str, ...] = ()
    resources: Resources = Resources()
    output: str = Field(min_length=1)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for kind, entries in (("models", self.models), ("recipes", self.recipes)):
            labels = [entry.label for entry in entries]
            for label in labels:
                if NAME.fullmatch(label) is None:
                    raise ValueError(
                        f"{kind}: {label!r} cannot be the name of a folder; give a `name:` of "
                        "letters, digits, `_`, `-` and `.`"
                    )
                if labels.count(label) > 1:
                    raise ValueError(
                        f"{kind}: two are called {label!r}; give one of them another `name:`"
                    )
        return self


def read_spec(path: Path) -> SweepSpec:
    """Read and check the file of a sweep.

    Raises:
        RecipeError: it cannot be read, or tells all that is wrong with it, each with its line, its
            key, what was found and what is allowed.
    """
    try:
        document = parse(path.read_bytes().decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    where = Where({key: Origin(str(path), line) for key, line in document.lines.items()})
    problems = [Problem(Origin(str(path), f.line), f.key, f.message) for f in document.faults]
    data = _spelled_out(document.data)
    if not isinstance(data, dict):
        empty = "found no keys; a sweep needs models, recipes and output"
        raise recipe_error(problems or [Problem(where(()), (), empty)], "sweep")
    spec = None
    try:
        spec = SweepSpec.model_validate_json(json.dumps(data))
    except ValidationError as error:
        named = {problem.key for problem in problems}
        found = [(key, text) for key, text in describe(error, SweepSpec, data) if key not in named]
        problems += [Problem(where(key), key, text) for key, text in found]
    if problems or spec is None:
        raise recipe_error(problems, "sweep")
    return spec


def _spelled_out(data: Any) -> Any:
    """The data with a mapping in the place of each entry that is text alone."""
    if isinstance(data, dict):
        for kind, key in (("models", "path"), ("recipes", "recipe")):
            if isinstance(data.get(kind), list):
                data[kind] = [{key: one} if isinstance(one, str) else one for one in data[kind]]
    return data
