"""The tasks of a sweep: one run of a recipe on a model each, and how far each has come.

OUTPUT/MODEL/RECIPE/            as `ptq run` leaves it
OUTPUT/MODEL/RECIPE.log         what it printed
OUTPUT/MODEL/RECIPE.task.json   how it ended
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from formats.errors import RecipeError, RequestError
from formats.files import replace_file
from formats.hub import find_model, is_hub_id
from formats.strict import Strict
from ptq.output import REPORT_FOLDER, is_taken
from ptq.recipe.own_model import find_recipe, shipped_paths
from ptq.recipe.reading import output_override, read_recipe, resolved_yaml
from ptq.recipe.strict_yaml import override_value
from ptq.sweep.spec import ModelEntry, RecipeEntry, Resources, SweepSpec

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
    output = Path(spec.output).expanduser().absolute()
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
        recipe = str(find_recipe(Path(recipe).expanduser(), folder).absolute())
    settings = [f"model.path={override_value(_model_path(model.path, folder))}"]
    settings += [*spec.set, *entry.set]
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
    return str((found or folder / Path(path).expanduser()).absolute())


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
