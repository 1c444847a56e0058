"""A sweep: its file, which says which recipes run on which models, and its tasks, one run each.

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

    OUTPUT/MODEL/RECIPE/            as `ptq run` leaves it
    OUTPUT/MODEL/RECIPE.log         what it printed
    OUTPUT/MODEL/RECIPE.task.json   how it ended
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from formats.documents import Strict
from formats.errors import RecipeError, RequestError
from formats.files import replace_file
from formats.hub import find_model, is_hub_id
from ptq.output import REPORT_FOLDER, is_taken
from ptq.recipe.draft import Override
from ptq.recipe.own_model import find_recipe, shipped_paths
from ptq.recipe.problems import Where, describe, recipe_error
from ptq.recipe.reading import output_override, read_recipe, resolved_yaml
from ptq.recipe.strict_yaml import Problem, override_value, parse

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
        document = parse(path.read_bytes().decode("utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is no UTF-8: {error}"
        wanted = "Give the YAML file of a sweep: models, recipes and output"
        raise RecipeError(f"{path}: cannot be read ({reason}). {wanted}") from error
    where, problems = Where(document.origins), document.problems
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


State = Literal["started", "passed", "missed", "failed"]
REPORT = Path(REPORT_FOLDER) / "report.json"


class Outcome(Strict):
    """How a task ended.

    Attributes:
        state: `passed`, `missed` (it ran, and a threshold of its recipe does not hold) or `failed`;
            `started` before it has ended, or where nobody saw its end.
        settings: SHA-256 of its recipe with every default spelled out.
        seconds: That it took, since it was started last.
        where: Node that it ran on.
        error: Why it failed, else None.
    """

    state: State
    settings: str
    seconds: float
    where: str
    error: str | None = None


@dataclass(frozen=True)
class Task:
    """One recipe on one model.

    Attributes:
        model: What the sweep calls the model.
        recipe: What it calls the recipe.
        words: Arguments of `ptq run` that do it, all paths absolute.
        settings: SHA-256 of the recipe with every default spelled out.
    """

    model: str
    recipe: str
    words: tuple[str, ...]
    output: Path
    settings: str
    resources: Resources

    @property
    def name(self) -> str:
        """Such as `tiny-python/w8_rtn`."""
        return f"{self.model}/{self.recipe}"

    @property
    def command(self) -> str:
        """What repeats it alone, quoted for a shell."""
        again = ("--force",) if is_taken(self.output) else ()
        return shlex.join(("ptq", "run", *self.words, *again))

    @property
    def log(self) -> Path:
        """The file with what it printed."""
        return self.output.with_name(f"{self.recipe}.log")

    @property
    def record(self) -> Path:
        """The file that tells how it ended."""
        return self.output.with_name(f"{self.recipe}.task.json")

    @property
    def has_report(self) -> bool:
        """Whether its run ended whole."""
        return (self.output / REPORT).is_file()

    def write(self, outcome: Outcome) -> None:
        """Note how it ended."""
        replace_file(self.record, outcome.model_dump_json(indent=2).encode())

    def ended(self) -> Outcome | None:
        """How it ended; None where there is no whole run, or its end was a failure.

        Raises:
            RequestError: its folder holds a run with other settings, or one that is no sweep's.
        """
        if not self.has_report:
            return None
        found = _read(self.record)
        if found is None or found.settings != self.settings:
            why = "no sweep's" if found is None else "of other settings"
            raise RequestError(
                f"{self.output} holds a run that is {why}; remove it, or give the sweep another "
                "`output`"
            )
        if found.state == "started":  # whoever watched it was killed
            passed = json.loads((self.output / REPORT).read_bytes())["passed"]
            return found.model_copy(update={"state": "passed" if passed else "missed"})
        return found if found.state != "failed" else None


def _read(record: Path) -> Outcome | None:
    try:
        return Outcome.model_validate_json(record.read_bytes())
    except (OSError, ValidationError):
        return None


def plan_tasks(spec: SweepSpec, folder: Path) -> list[Task]:
    """All tasks of a sweep, recipe by recipe for each model, every recipe read and checked.

    Args:
        folder: That paths in it are relative to.

    Raises:
        RecipeError: tells every task whose recipe or model is wrong, and how.
    """
    output = Path(os.path.expanduser(spec.output)).absolute()
    tasks: list[Task] = []
    faults: list[str] = []
    for model in spec.models:
        for entry in spec.recipes:
            try:
                tasks.append(_task(spec, model, entry, folder, output))
            except RecipeError as error:
                indented = str(error).replace("\n", "\n  ")
                faults.append(f"{model.label}/{entry.label}: {indented}")
    if faults:
        count = f"{len(faults)} of {len(spec.models) * len(spec.recipes)} tasks cannot run"
        raise RecipeError("\n".join([count, *faults]))
    return tasks


def _task(
    spec: SweepSpec, model: ModelEntry, entry: RecipeEntry, folder: Path, output: Path
) -> Task:
    recipe = entry.recipe
    if (folder / recipe).is_file() or recipe not in shipped_paths():
        recipe = str(find_recipe(Path(os.path.expanduser(recipe)), folder).absolute())
    path = override_value(_model_path(model.path, folder))
    settings = [Override(f"model.path={path}", f"models: {model.path}"), *spec.set, *entry.set]
    run = output / model.label / entry.label
    loaded = read_recipe(recipe, [*settings, *output_override(run)])
    words = [recipe, *(word for one in settings for word in ("--set", one)), "--output", str(run)]
    digest = hashlib.sha256(resolved_yaml(loaded.recipe).encode()).hexdigest()
    resources = entry.resources or spec.resources
    return Task(model.label, entry.label, tuple(words), run, digest, resources)


def _model_path(path: str, folder: Path) -> str:
    """A model's folder as an absolute path; a name of the hub as it is."""
    found = find_model(path, folder)
    if found is None and is_hub_id(path):
        return path
    return str((found or folder / os.path.expanduser(path)).absolute())


def left_to_run(tasks: Sequence[Task]) -> list[Task]:
    """Those without a whole run, in their order.

    Raises:
        RequestError: tells every folder that holds another run.
    """
    left: list[Task] = []
    faults: list[str] = []
    for task in tasks:
        try:
            if task.ended() is None:
                left.append(task)
        except RequestError as error:
            faults.append(str(error))
    if faults:
        raise RequestError("\n".join(faults))
    return left
