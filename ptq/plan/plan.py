"""The plan: what happens to each module of a model, decided before any work is done.

A recipe is held against a model's configuration and the headers of its files; no weight is read.
All that could stop a run later is looked for here, and everything found is said at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd
from transformers import PretrainedConfig

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.family import Family
from formats.families.groups import SmoothingGroup, SmoothingKind, smoothing_groups
from formats.families.names import by_block
from formats.families.registry import BY_TYPE, block_names, family_of
from formats.modeling.model import meta_model
from formats.scheme import LayerScheme, Strict
from ptq.methods.common.float_model import FloatModel, FloatModelView
from ptq.methods.common.stored_layers import kept_layers, seen_as_floats
from ptq.methods.registry import view_of
from ptq.plan import preflight
from ptq.plan.footprint import Footprint
from ptq.plan.module_faults import check_modules
from ptq.plan.modules import ModulePlan, layer_shapes, plan_modules
from ptq.plan.peers import check_peers
from ptq.plan.shapes import Shape, block_shapes
from ptq.recipe.problems import Problem, Where, recipe_error
from ptq.recipe.reading import LoadedRecipe
from ptq.recipe.schema import Recipe
from ptq.recipe.strict_yaml import Key


class ModelSummary(Strict):
    """The model that is quantized: its family, sizes and element type."""

    model_type: str
    blocks: int
    parameters: int
    nbytes: int
    dtype: str


class Prediction(Strict):
    """What a run takes.

    Attributes:
        checkpoint_bytes: Of the checkpoint's weight files.
        memory_bytes: Peak of the host's memory, the process itself aside.
        device_bytes: Peak of the GPU's memory; 0 where blocks are solved on the CPU.
        disk_bytes: Most that is on the disk at once: the checkpoint, what a stopped run goes on
            with, and statistics.
        moments_bytes: Of the second moments that are kept for `ptq solve`; 0 where none are.
    """

    checkpoint_bytes: int
    memory_bytes: int
    device_bytes: int
    disk_bytes: int
    moments_bytes: int


class Plan(Strict):
    """Everything that the driver needs to know.

    Attributes:
        recipe: The resolved recipe.
        modules: Every linear layer and router of the model, in its order.
        smoothing: Groups that the recipe's methods smooth, block by block.
        blocks: Full names of the decoder blocks, in their order.
        model: The model as it comes.
        prediction: What the run will take.
        transforms: What the recipe makes of the float model before anything is observed.
    """

    recipe: Recipe
    modules: tuple[ModulePlan, ...]
    smoothing: tuple[SmoothingGroup, ...]
    blocks: tuple[str, ...]
    model: ModelSummary
    prediction: Prediction
    transforms: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[str, ...]:
        """Full names of the linear layers that are quantized, in the model's order."""
        return tuple(module.name for module in self.modules if module.action == "quantize")

    @property
    def family(self) -> Family:
        """The declaration of the model's family."""
        return BY_TYPE[self.model.model_type]

    @property
    def schemes(self) -> dict[str, LayerScheme]:
        """Schemes of the quantized layers by full name."""
        return {name: self.recipe.scheme_of(name) for name in self.quantized}

    def to_table(self) -> pd.DataFrame:
        """One row for each linear layer: name, action, reason, shape, fused_group."""
        return pd.DataFrame([module.model_dump() for module in self.modules])


def plan_recipe(loaded: LoadedRecipe, *, force: bool = False, solves: bool = True) -> Plan:
    """Open the model that a recipe names and plan the run; arguments and errors of `build_plan`.

    Raises:
        CheckpointError: the model cannot be had.
        RecipeError: also where its files are damaged, or are no model's.
    """
    recipe = loaded.pinned().recipe
    folder = recipe.model.folder
    try:
        checkpoint = Checkpoint.open(folder)
    except CheckpointError as error:
        at = preflight.MODEL
        raise recipe_error([Problem(loaded.where(at), at, str(error))]) from error
    return build_plan(recipe, checkpoint, loaded.where, force=force, solves=solves)


def build_plan(
    recipe: Recipe,
    checkpoint: Checkpoint,
    where: Where | None = None,
    *,
    force: bool = False,
    solves: bool = True,
) -> Plan:
    """Decide what happens to each module, and look for everything that would stop the run.

    Args:
        recipe: The run.
        checkpoint: The model that the recipe names.
        where: Origins of the recipe's values, for messages.
        force: Whether an existing output may be replaced.
        solves: Whether blocks will be solved here, and not only told of or measured.

    Raises:
        RecipeError: tells all that was found: an unsupported, quantized or incomplete model, a
            missing or foreign tokenizer, patterns that match no layer or split a fused group,
            sequences that are too long, an output that is taken or does not fit on its disk,
            devices that are not here, peers that are not installed.
    """
    where = where or Where()
    config = preflight.read_config(checkpoint, where)
    blocks, model = block_names(config.to_dict()), meta_model(config)
    shapes = dict(layer_shapes(model))
    names, family = by_block(shapes), family_of(checkpoint.config)
    floats = seen_as_floats(checkpoint)
    kept = kept_layers(floats)
    modules = tuple(plan_modules(recipe, family, blocks, shapes, names, kept))
    quantized = {m.name: recipe.scheme_of(m.name) for m in modules if m.action == "quantize"}
    source = view_of(floats, recipe.methods)
    prediction = _predict(recipe, source, config, shapes, quantized, blocks)
    problems: list[tuple[Key, str]] = [
        *preflight.check_tensors(floats, config, model),
        *preflight.check_tokenizer(checkpoint, config),
        *preflight.check_data(recipe),
        *preflight.check_lengths(recipe, config),
        *preflight.check_patterns(recipe, shapes, quantized),
        *check_modules(recipe, family, modules),
        *preflight.check_output(recipe, prediction.disk_bytes, force),
        *preflight.check_devices(recipe, solves),
        *check_peers(recipe),
    ]
    if problems:
        raise recipe_error(Problem(where(key), key, message) for key, message in problems)
    return Plan(
        recipe=recipe,
        modules=modules,
        smoothing=tuple(_smoothing_groups(recipe, family, blocks, names)),
        blocks=blocks,
        model=_summary(floats, checkpoint.nbytes, len(blocks)),
        prediction=prediction,
        transforms=tuple(source.describe()) if isinstance(source, FloatModelView) else (),
    )


def _predict(
    recipe: Recipe,
    source: FloatModel,
    config: PretrainedConfig,
    shapes: Mapping[str, Shape],
    quantized: Mapping[str, LayerScheme],
    blocks: Sequence[str],
) -> Prediction:
    """What a run takes, from the model's headers."""
    written = {**quantized, **kept_layers(source)}
    size = preflight.predict_checkpoint(source, config, written, recipe.scheme.kv_cache)
    sizes = tuple(block_shapes(source, config, shapes, quantized, blocks))
    footprint = Footprint(recipe, source, sizes, size, preflight.on_gpu(recipe))
    return Prediction(
        checkpoint_bytes=size,
        memory_bytes=footprint.host(),
        device_bytes=footprint.device(),
        disk_bytes=footprint.disk(),
        moments_bytes=footprint.moments(),
    )


def _smoothing_groups(
    recipe: Recipe, family: Family, blocks: tuple[str, ...], names: Mapping[str, list[str]]
) -> Iterator[SmoothingGroup]:
    kinds: dict[SmoothingKind, None] = {}
    for method in recipe.methods:
        kinds |= dict.fromkeys(method.smooths)
    for block in blocks:
        yield from smoothing_groups(family, block, names[block], tuple(kinds))


def _summary(checkpoint: FloatModel, nbytes: int, blocks: int) -> ModelSummary:
    dtypes = sorted({str(checkpoint.dtype(n)).removeprefix("torch.") for n in checkpoint.names()})
    return ModelSummary(
        model_type=checkpoint.config["model_type"],
        blocks=blocks,
        parameters=sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names()),
        nbytes=nbytes,
        dtype=", ".join(dtypes),
    )
