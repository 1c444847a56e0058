"""Quantization from Python: `ptq.quantize`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from formats.errors import RecipeError
from ptq.pipeline.driver import quantize as run_plan
from ptq.plan.plan import plan_recipe
from ptq.recipe.problems import Where
from ptq.recipe.reading import LoadedRecipe, output_override, read_recipe
from ptq.recipe.schema import OutputSpec, Recipe
from ptq.result import QuantizationResult


def quantize(
    recipe: str | Path | Recipe,
    *,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    force: bool = False,
    progress: bool = True,
) -> QuantizationResult:
    """Quantize a model as a recipe says, without the report that `ptq run` ends with.

        result = ptq.quantize("recipes/a8w8c8.yaml", overrides=["model.path=my-model"])
        engine = ptq.Engine.from_pretrained(result.checkpoint)

    An earlier run of the same recipe that was stopped goes on where it was. `ptq report OUTPUT`
    measures afterwards what the quantization cost.

    Args:
        recipe: A YAML file, or a recipe made in Python.
        overrides: `key.key=value` each, as `--set` takes them; for a file only.
        output: Folder to write `checkpoint/` and the run's record to, instead of the recipe's.
        force: Replace what the output folder holds.
        progress: Show a progress bar.

    Raises:
        RecipeError: the recipe is invalid, does not fit the model, or its data cannot be used.
        CheckpointError: the model is damaged, the output exists, or it cannot be written.
    """
    plan = plan_recipe(_load(recipe, overrides, output), force=force)
    return run_plan(plan, force=force, progress=progress)


def _load(
    recipe: str | Path | Recipe, overrides: Sequence[str], output: str | Path | None
) -> LoadedRecipe:
    if not isinstance(recipe, Recipe):
        return read_recipe(recipe, [*overrides, *output_override(output)])
    if overrides:
        raise RecipeError(
            f"found overrides {list(overrides)} of a recipe that is no file; change the Recipe "
            "itself with its `model_copy`, or give the path of a YAML file"
        )
    if output is not None:
        recipe = recipe.model_copy(update={"output": OutputSpec(path=Path(output).absolute())})
    return LoadedRecipe(recipe, Where())
