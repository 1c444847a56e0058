"""Quantization from Python: `ptq.quantize`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from formats.errors import RecipeError
from formats.files import output_locked
from ptq.convert.convert import write_beside
from ptq.pipeline.driver import quantize as run_plan
from ptq.pipeline.resume import telling_what_is_kept
from ptq.plan.plan import plan_recipe
from ptq.plan.preflight import read_data
from ptq.recipe.own_model import default_output, recipe_of, settings_for
from ptq.recipe.problems import Where
from ptq.recipe.reading import LoadedRecipe, output_override, read_recipe
from ptq.recipe.schema import OutputSpec, Recipe
from ptq.result import QuantizationResult
from ptq.search.search import search


def quantize(
    recipe: str | Path | Recipe | None = None,
    *,
    model: str | Path | None = None,
    scheme: str | None = None,
    data: str | Path | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    force: bool = False,
    progress: bool = True,
) -> QuantizationResult:
    """Quantize a model as a recipe says, without the report that `ptq run` ends with.

        result = ptq.quantize(model="my-model", scheme="w4", data="rows.jsonl")
        result = ptq.quantize("a8w8c8", model="organization/model")
        result = ptq.quantize("mine.yaml", overrides=["dataset.calibration.samples=128"])
        engine = ptq.Engine.from_pretrained(result.checkpoint)

    A recipe's `budget` is kept as by `ptq run`: choices are measured on the evaluation split, and
    `recipe.yaml` in the output says which was taken. Where none of those measured keeps it, the
    result is the one that loses least, and `ptq report OUTPUT` says that it missed.

    An earlier run of the same recipe that was stopped goes on where it was. `ptq report OUTPUT`
    measures afterwards what the quantization cost.

    Args:
        recipe: A YAML file, a shipped recipe's name, or a recipe made in Python.
        model: Folder of the model or its name on the hub, instead of the recipe's.
        scheme: In the place of a recipe: `w4`, `a8w8c8` or another of `ptq quantize --help`.
        data: File, folder or `datasets` name to calibrate on, instead of the recipe's; half of its
            documents are kept for the evaluation.
        revision: Branch, tag or commit of a model on the hub.
        adapter: Folder of a LoRA adapter of the model as PEFT saves it, or its name on the hub; it
            is merged into the weights first.
        overrides: `key.key=value` each, as `--set` takes them.
        output: Folder to write `checkpoint/` and the run's record to, instead of the recipe's; for
            a model that is given, default `output/MODEL-SCHEME`.
        force: Replace what the output folder holds.
        progress: Show a progress bar.

    Raises:
        RecipeError: the recipe is invalid, does not fit the model, its data cannot be used, nothing
            can keep its budget, files of the model are missing or not whole, or the output exists.
        CheckpointError: the model's weights are damaged, or the output cannot be written or is
            another process's.
    """
    if isinstance(overrides, str):
        raise RecipeError(f"overrides: found the text {overrides!r}; give a list: [{overrides!r}]")
    recipe, label = _chosen(recipe, model, scheme)
    if isinstance(recipe, Recipe):
        given = [x for x in (model, data, revision, adapter, *overrides) if x is not None]
        return _run(_of_python(recipe, given, output), force=force, progress=progress)
    if model is not None and output is None:
        output = default_output(model, label)
    settings = settings_for(model, data=data, revision=revision, adapter=adapter, given=overrides)
    loaded = read_recipe(recipe, [*settings, *output_override(output)])
    return _run(loaded, force=force, progress=progress)


def _chosen(
    recipe: str | Path | Recipe | None, model: str | Path | None, scheme: str | None
) -> tuple[str | Path | Recipe, str]:
    """The recipe, a scheme's where one is given in its place, and what an output is called by.

    Raises:
        RecipeError: neither is given, or both, or no model with a scheme, or there is no such one.
    """
    if scheme is not None and recipe is None and model is not None:
        return recipe_of(scheme), scheme
    if recipe is None or scheme is not None:
        raise RecipeError("give a recipe, or a model and a scheme")
    return recipe, str(recipe)


def _run(loaded: LoadedRecipe, *, force: bool, progress: bool) -> QuantizationResult:
    """`quantize` of a recipe that was read."""
    folder = loaded.recipe.output.path
    with output_locked(folder), telling_what_is_kept(folder):
        plan = plan_recipe(loaded, force=force)
        if plan.recipe.budget is not None:
            ordered = search(loaded.pinned(), read_data(plan.recipe), progress=progress)
            plan, result = ordered.plan, ordered.result
        else:
            result = run_plan(plan, force=force, progress=progress)
        write_beside(result, plan.recipe.output, progress=progress)
        return result


def _of_python(recipe: Recipe, given: Sequence[object], output: str | Path | None) -> LoadedRecipe:
    """A recipe made in Python, as one that was read.

    Raises:
        RecipeError: something is given that is put into recipes as text only.
    """
    if given:
        raise RecipeError(
            f"found {', '.join(map(repr, given))} for a recipe that is no file; change the Recipe "
            "itself with its `model_copy`, or give the path or name of a YAML file"
        )
    if output is not None:
        path = Path(os.path.expanduser(output)).absolute()
        recipe = recipe.model_copy(update={"output": OutputSpec(path=path)})
    return LoadedRecipe(recipe, Where())
