"""The plan: what happens to each module of a model, decided before any work is done.

A recipe is held against a model's configuration and the headers of its files; no weight is read.
All that could stop a run later is looked for here, and everything found is said at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from transformers import PretrainedConfig

from formats.cache_scheme import KVCacheSpec
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.block_layers import (
    SMOOTHING_KINDS,
    SmoothingGroup,
    SmoothingKind,
    by_block,
    smoothing_groups,
)
from formats.families.family import Family
from formats.families.registry import BY_TYPE, find_family
from formats.modeling.layers import (
    attention_of_blocks,
    block_names,
    embedding_name,
    head_name,
    structure_of,
)
from formats.modeling.model import meta_model
from formats.scheme import LayerScheme, Strict
from ptq.methods.common.float_model import FloatModel, FloatModelView, kept_layers, seen_as_floats
from ptq.methods.registry import view_of
from ptq.plan import preflight
from ptq.plan.checked_groups import checked_groups
from ptq.plan.group_sizes import settle_groups
from ptq.plan.machine import Footprint, check_devices, on_gpu
from ptq.plan.module_faults import check_caches, check_modules, settle_keys
from ptq.plan.modules import (
    ModulePlan,
    Shape,
    block_shapes,
    layer_shapes,
    plan_modules,
    plan_predicting,
    shared_embedding,
)
from ptq.plan.preflight import check_peers
from ptq.recipe.problems import Faults, Where
from ptq.recipe.reading import LoadedRecipe
from ptq.recipe.schema import Recipe

DRAFTS = "of a layer that predicts further tokens, through which no sample runs"


class ModelSummary(Strict):
    """The model that is quantized: its family, sizes and element type.

    Attributes:
        loose: Parameters of its blocks that no linear layer and no router has.
    """

    model_type: str
    blocks: int
    parameters: int
    loose: int
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
        factors_bytes: Of the Fisher factors, likewise.
    """

    checkpoint_bytes: int
    memory_bytes: int
    device_bytes: int
    disk_bytes: int
    moments_bytes: int
    factors_bytes: int


class Plan(Strict):
    """Everything that the driver needs to know.

    Attributes:
        modules: Every linear layer and router of the model, in its order.
        smoothing: Groups that the recipe's methods smooth, block by block.
        blocks: Full names of the decoder blocks, in their order.
        attentions: Full names of their attention modules; None of a block that has none.
        model: The model as it comes.
        prediction: What the run will take.
        transforms: What the recipe makes of the float model before anything is observed.
        left: Where nothing is declared, what was tried for smoothing and is left alone.
        head: Full name of the layer that gives logits, where it is quantized.
        shared: Name of the embedding's tensor, where the quantized head is the embedding, too.
        groups: Of each group size that is smaller than the recipe would have it: where, and why.
        predicting: Full names of the linear layers among the quantized ones that are in layers
            that predict further tokens.
    """

    recipe: Recipe
    modules: tuple[ModulePlan, ...]
    smoothing: tuple[SmoothingGroup, ...]
    blocks: tuple[str, ...]
    attentions: tuple[str | None, ...]
    model: ModelSummary
    prediction: Prediction
    transforms: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    head: str | None = None
    shared: str | None = None
    groups: tuple[str, ...] = ()
    predicting: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[str, ...]:
        """Full names of the linear layers that are quantized, in the model's order."""
        return tuple(module.name for module in self.modules if module.action == "quantize")

    @property
    def sinks_by_values(self) -> bool:
        """Whether small values tell sink tokens, too; see `calibrate.sinks`."""
        cached = any(self.recipe.cache_of(block) is not None for block in self.blocks)
        return cached or not any(scheme.static_input for scheme in self.schemes.values())

    @property
    def family(self) -> Family | None:
        """The declaration of the model's family; None where there is none."""
        return BY_TYPE.get(self.model.model_type)

    @property
    def schemes(self) -> dict[str, LayerScheme]:
        """Schemes of the quantized layers by full name."""
        return _schemes(self.recipe, self.modules, self.predicting)

    @property
    def caches(self) -> dict[str, KVCacheSpec | None]:
        """How the caches of attention modules are quantized that have one of their own."""
        found = {
            name: self.recipe.cache_of(block)
            for block, name in zip(self.blocks, self.attentions, strict=True)
            if name is not None
        }
        return {name: own for name, own in found.items() if own != self.recipe.scheme.kv_cache}


def plan_recipe(loaded: LoadedRecipe, *, force: bool = False, solves: bool = True) -> Plan:
    """Open the model that a recipe names and plan the run; arguments and errors of `build_plan`.

    Raises:
        CheckpointError: the model cannot be had.
        RecipeError: also where its files are damaged, or are no model's, or an adapter is of
            another.
    """
    recipe = loaded.pinned().recipe
    at = preflight.MODEL
    folder = recipe.model.base
    try:
        if recipe.model.adapter is not None:
            at = preflight.ADAPTER
            folder = recipe.model.folder
        checkpoint = Checkpoint.open(folder)
    except CheckpointError as error:
        raise loaded.where.error([(at, str(error))]) from error
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
        checkpoint: The model that the recipe names.
        where: Origins of the recipe's values, for messages.
        force: Whether an existing output may be replaced.
        solves: Whether blocks will be solved here, and not only listed or measured.

    Raises:
        RecipeError: tells all that was found: an unsupported, quantized or incomplete model, a
            missing or foreign tokenizer, patterns that match no layer or split a fused group,
            sequences that are too long, an output that is taken or does not fit on its disk,
            devices that are not here, peers that are not installed.
    """
    where = where or Where()
    config, values = preflight.read_config(checkpoint, where), checkpoint.config
    recipe = preflight.with_named_head(recipe, values)
    blocks, model = block_names(values), meta_model(config)
    shapes = dict(layer_shapes(model, values))
    recipe = settle_keys(recipe, find_family(values), values, blocks, where)
    names, floats = by_block(shapes), seen_as_floats(checkpoint)
    bare = next((block for block in blocks if block not in names), None)
    if bare is not None:
        fault = f"{bare} has no linear layer that is known here, so that nothing of it is quantized"
        raise where.error([(preflight.MODEL, fault)])
    tensors = list(preflight.check_tensors(floats, model))
    recipe, idle = _without_idle(recipe, floats)
    if undeclared := list(preflight.check_declared(recipe, values)):
        raise where.error(undeclared + tensors)
    source = view_of(floats, recipe.methods)
    recipe, modules, sizes, predicting = _settled(recipe, source, blocks, shapes, names)
    quantized, wanted = _schemes(recipe, modules, predicting), _wanted(recipe)
    groups, left = _smoothing(source, config, values, blocks, names, () if tensors else wanted)
    plan = Plan(
        recipe=recipe,
        modules=modules,
        smoothing=tuple(_in_order(groups, blocks, wanted)),
        blocks=blocks,
        attentions=attention_of_blocks(values),
        model=_summary(floats, checkpoint.nbytes, blocks, modules),
        prediction=_predict(recipe, source, config, shapes, quantized, blocks, groups),
        transforms=(*(source.describe() if isinstance(source, FloatModelView) else ()), *idle),
        left=left,
        head=head_name(values) if head_name(values) in quantized else None,
        shared=shared_embedding(source, quantized),
        groups=sizes,
        predicting=predicting,
    )
    problems = [*tensors, *_faults(plan, checkpoint, config, force=force, solves=solves)]
    if problems:
        raise where.error(problems)
    return plan


def _without_idle(recipe: Recipe, model: FloatModel) -> tuple[Recipe, list[str]]:
    """A recipe without the methods that would change nothing of a model, and a line for each."""
    idle = {method.name: why for method in recipe.methods if (why := method.idle(model))}
    methods = tuple(method for method in recipe.methods if method.name not in idle)
    lines = [f"leaves out the method {name}: {why}" for name, why in idle.items()]
    return recipe.model_copy(update={"methods": methods}), lines


def _smoothing(
    source: FloatModel,
    config: PretrainedConfig,
    values: Mapping[str, Any],
    blocks: Sequence[str],
    names: Mapping[str, list[str]],
    wanted: Sequence[SmoothingKind],
) -> tuple[tuple[SmoothingGroup, ...], tuple[str, ...]]:
    """All groups that the model's family declares, or those wanted that `checked_groups` gives."""
    family = find_family(values)
    if family is not None:
        every = (smoothing_groups(family, b, names[b], SMOOTHING_KINDS) for b in blocks)
        return tuple(chain.from_iterable(every)), ()
    return checked_groups(source, config, structure_of(values), wanted) if wanted else ((), ())


def _faults(
    plan: Plan, checkpoint: Checkpoint, config: PretrainedConfig, *, force: bool, solves: bool
) -> Faults:
    """What would stop a run of the plan, beyond tensors that the model lacks."""
    recipe, family, linears = plan.recipe, plan.family, {m.name: m.shape for m in plan.modules}
    yield from preflight.check_tokenizer(checkpoint, config)
    yield from preflight.check_data(recipe)
    yield from preflight.check_lengths(recipe, config)
    yield from preflight.check_patterns(recipe, linears, plan.schemes)
    yield from check_modules(recipe, family, plan.modules)
    yield from check_caches(recipe, family, checkpoint.config, plan.blocks)
    yield from preflight.check_output(recipe, plan.prediction.disk_bytes, force)
    yield from preflight.check_gguf(recipe, checkpoint)
    yield from check_devices(recipe, solves)
    yield from check_peers(recipe)


def _settled(
    recipe: Recipe,
    source: FloatModel,
    blocks: tuple[str, ...],
    shapes: Mapping[str, Shape],
    names: Mapping[str, list[str]],
) -> tuple[Recipe, tuple[ModulePlan, ...], tuple[str, ...], tuple[str, ...]]:
    """What `settle_groups` gives, and which quantized layers predict further tokens."""
    further = tuple(plan_predicting(recipe, source))
    predicting = tuple(module.name for module in further if module.action == "quantize")
    of_model = plan_modules(recipe, source.config, blocks, shapes, names, kept_layers(source))
    dtype = source.dtype(f"{embedding_name(source.config)}.weight")
    settled, modules, notes = settle_groups(recipe, (*of_model, *further), dtype)
    schemes = _schemes(settled, further, predicting)
    why = {name: f"{scheme.text}, to the nearest: {DRAFTS}" for name, scheme in schemes.items()}
    modules = tuple(m.model_copy(update={"reason": why.get(m.name, m.reason)}) for m in modules)
    return settled, modules, notes, predicting


def _schemes(
    recipe: Recipe, modules: Sequence[ModulePlan], predicting: Sequence[str]
) -> dict[str, LayerScheme]:
    """Schemes of the quantized layers; of those for further tokens, which no sample calibrates."""
    names = (module.name for module in modules if module.action == "quantize")
    found = {name: recipe.scheme_of(name) for name in names}
    return found | {name: found[name].by_token for name in predicting}


def _predict(
    recipe: Recipe,
    source: FloatModel,
    config: PretrainedConfig,
    shapes: Mapping[str, Shape],
    quantized: Mapping[str, LayerScheme],
    blocks: Sequence[str],
    smoothed: Sequence[SmoothingGroup],
) -> Prediction:
    """What a run takes, from the model's headers."""
    written = {**quantized, **kept_layers(source)}
    size = preflight.predict_checkpoint(source, written, list(map(recipe.cache_of, blocks)))
    sizes = tuple(block_shapes(source, config, shapes, quantized, blocks, smoothed))
    name = head_name(source.config)
    head = shapes[name] if name in quantized else None
    footprint = Footprint(recipe, source, sizes, size, on_gpu(recipe), head)
    return Prediction(
        checkpoint_bytes=size,
        memory_bytes=footprint.host(),
        device_bytes=footprint.device(),
        disk_bytes=footprint.disk(),
        moments_bytes=footprint.moments(),
        factors_bytes=footprint.factors(),
    )


def _wanted(recipe: Recipe) -> tuple[SmoothingKind, ...]:
    """Kinds of smoothing groups whose factors a recipe's methods choose."""
    return tuple(dict.fromkeys(kind for method in recipe.methods for kind in method.smooths))


def _in_order(
    groups: Sequence[SmoothingGroup], blocks: Sequence[str], kinds: Sequence[SmoothingKind]
) -> list[SmoothingGroup]:
    """Those of the wanted kinds, block by block, in the order of the kinds."""
    place = {block: i for i, block in enumerate(blocks)}
    wanted = (group for group in groups if group.kind in kinds)
    return sorted(wanted, key=lambda group: (place[group.block], kinds.index(group.kind)))


def _summary(
    checkpoint: FloatModel, nbytes: int, blocks: Sequence[str], modules: Sequence[ModulePlan]
) -> ModelSummary:
    dtypes = sorted({str(checkpoint.dtype(n)).removeprefix("torch.") for n in checkpoint.names()})
    sizes = {name: math.prod(checkpoint.shape(name)) for name in checkpoint.names()}
    inside, layers = tuple(f"{block}." for block in blocks), {module.name for module in modules}
    loose = (n for n in sizes if n.startswith(inside) and n.rpartition(".")[0] not in layers)
    return ModelSummary(
        model_type=checkpoint.config["model_type"],
        blocks=len(blocks),
        parameters=sum(sizes.values()),
        loose=sum(map(sizes.__getitem__, loose)),
        nbytes=nbytes,
        dtype=", ".join(dtypes),
    )
