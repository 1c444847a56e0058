"""The plan: what happens to each module of a model, decided before any work is done.

A recipe is held against a model's configuration and the headers of its files; no weight is read.
All that could stop a run later is looked for here, and everything found is said at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import pandas as pd
from torch import nn
from transformers import PretrainedConfig

from calibrate.layers import meta_model
from formats.checkpoint.compressed_tensors import is_ignored
from formats.checkpoint.read import Checkpoint
from formats.families.family import Family
from formats.families.groups import SmoothingGroup, SmoothingKind, merged_layers, smoothing_groups
from formats.families.names import by_block, is_router
from formats.families.registry import BY_TYPE, block_names, family_of
from formats.scheme import LayerScheme, Strict
from ptq.methods.common.float_model import FloatModel, FloatModelView
from ptq.methods.registry import view_of
from ptq.peers.check import check_peers
from ptq.plan import preflight
from ptq.plan.footprint import Footprint
from ptq.plan.shapes import Shape, block_shapes
from ptq.recipe.problems import Problem, Where, recipe_error
from ptq.recipe.schema import LoadedRecipe, Recipe
from ptq.recipe.strict_yaml import Key


class ModulePlan(Strict):
    """What happens to one linear layer or router.

    Attributes:
        name: Full name.
        action: Whether its weight and input are quantized or stay as they are.
        reason: Why, for a person.
        shape: Of its weight: (out, in).
        fused_group: Full name of the fused layer that it becomes a part of at run time, if any.
    """

    name: str
    action: Literal["quantize", "float"]
    reason: str
    shape: tuple[int, int]
    fused_group: str | None


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
    """

    checkpoint_bytes: int
    memory_bytes: int
    device_bytes: int
    disk_bytes: int


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


def plan_recipe(loaded: LoadedRecipe, *, force: bool = False) -> Plan:
    """Open the model that a recipe names and plan the run; arguments and errors of `build_plan`.

    Raises:
        CheckpointError: the model's files are damaged.
    """
    checkpoint = Checkpoint.open(loaded.recipe.model.path)
    return build_plan(loaded.recipe, checkpoint, loaded.where, force=force)


def build_plan(
    recipe: Recipe, checkpoint: Checkpoint, where: Where | None = None, *, force: bool = False
) -> Plan:
    """Decide what happens to each module, and look for everything that would stop the run.

    Args:
        recipe: The run.
        checkpoint: The model that the recipe names.
        where: Origins of the recipe's values, for messages.
        force: Whether an existing output may be replaced.

    Raises:
        RecipeError: tells all that was found: an unsupported, quantized or incomplete model, a
            missing or foreign tokenizer, patterns that match no layer or split a fused group,
            sequences that are too long, an output that is taken or does not fit on its disk, peers
            that are not installed.
    """
    where = where or Where()
    config = preflight.read_config(checkpoint, where)
    blocks, model = block_names(config.to_dict()), meta_model(config)
    shapes = dict(_layer_shapes(model))
    names, family = by_block(shapes), family_of(checkpoint.config)
    modules = tuple(_plan_modules(recipe, family, blocks, shapes, names))
    quantized = {m.name: recipe.scheme_of(m.name) for m in modules if m.action == "quantize"}
    source = view_of(checkpoint, recipe.methods)
    prediction = _predict(recipe, source, config, shapes, quantized, blocks)
    problems: list[tuple[Key, str]] = [
        *preflight.check_tensors(checkpoint, config, model),
        *preflight.check_tokenizer(checkpoint, config),
        *preflight.check_data(recipe),
        *preflight.check_lengths(recipe, config),
        *preflight.check_patterns(recipe, shapes, quantized),
        *_check_groups(recipe, modules),
        *preflight.check_output(recipe, prediction.disk_bytes, force),
        *preflight.check_report_device(recipe),
        *check_peers(recipe),
    ]
    if problems:
        raise recipe_error(Problem(where(key), key, message) for key, message in problems)
    return Plan(
        recipe=recipe,
        modules=modules,
        smoothing=tuple(_smoothing_groups(recipe, family, blocks, names)),
        blocks=blocks,
        model=_summary(checkpoint, len(blocks)),
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
    size = preflight.predict_checkpoint(source, config, quantized, recipe.scheme.kv_cache)
    sizes = tuple(block_shapes(source, config, shapes, quantized, blocks))
    footprint = Footprint(recipe, source, sizes, size, preflight.on_gpu(recipe))
    return Prediction(
        checkpoint_bytes=size,
        memory_bytes=footprint.host(),
        device_bytes=footprint.device(),
        disk_bytes=footprint.disk(),
    )


def _layer_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Linear layers and routers of a model, with the shapes of their weights."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear) or is_router(name):
            rows, columns = part.get_parameter("weight").shape
            yield name, (rows, columns)


def _plan_modules(
    recipe: Recipe,
    family: Family,
    blocks: tuple[str, ...],
    shapes: Mapping[str, tuple[int, int]],
    names: Mapping[str, list[str]],
) -> Iterator[ModulePlan]:
    inside, merged = set[str](), dict[str, str]()
    for block in blocks:
        inside |= set(names[block])
        merged |= merged_layers(family, block, names[block])
    for name, shape in shapes.items():
        kept = None if name in inside else "outside of the decoder blocks"
        kept = kept or _kept_reason(recipe, name)
        yield ModulePlan(
            name=name,
            action="float" if kept else "quantize",
            reason=kept or recipe.scheme_of(name).text,
            shape=shape,
            fused_group=merged.get(name),
        )


def _kept_reason(recipe: Recipe, name: str) -> str | None:
    """Why a layer of a decoder block stays in float, if it does."""
    if recipe.scheme.weights is None:
        return f"scheme {recipe.scheme.wac} quantizes the cache only"
    if is_router(name):
        return "router: it decides how much each expert counts"
    ignored = next((entry for entry in recipe.ignore if is_ignored(name, [entry])), None)
    return None if ignored is None else f"ignored by {ignored!r}"


def _check_groups(recipe: Recipe, modules: tuple[ModulePlan, ...]) -> Iterator[tuple[Key, str]]:
    """Fused layers of which only some are ignored, and a scheme that finds nothing to quantize."""
    groups: dict[str, list[ModulePlan]] = {}
    for module in modules:
        if module.fused_group is not None:
            groups.setdefault(module.fused_group, []).append(module)
    for group, members in groups.items():
        kept = [m.name.rpartition(".")[2] for m in members if m.action == "float"]
        if 0 < len(kept) < len(members):
            names = ", ".join(m.name.rpartition(".")[2] for m in members)
            entries = [
                i
                for i, entry in enumerate(recipe.ignore)
                if any(is_ignored(m.name, [entry]) for m in members)
            ]
            yield (
                ("ignore", entries[0]),
                f"{group} fuses {names}, but only {', '.join(kept)} "
                f"{'is' if len(kept) == 1 else 'are'} ignored; ignore all of them or none",
            )
        elif not kept:
            yield from _check_one_scheme(recipe, group, [m.name for m in members])
    yield from _check_divisible(recipe, modules)
    left = [m.name for m in modules if m.action == "quantize"]
    if recipe.scheme.weights is not None and not left:
        yield ("ignore",), f"leaves no layer to the scheme {recipe.scheme.wac}; ignore fewer"
    if left and recipe.scheme.of_layers not in map(recipe.scheme_of, left):
        yield (
            ("layers",),
            f"leaves no layer to the scheme {recipe.scheme.wac}; give scheme what most of the "
            "layers are to have",
        )


def _check_one_scheme(
    recipe: Recipe, group: str, members: Sequence[str]
) -> Iterator[tuple[Key, str]]:
    """Layers that become one at run time and would be stored by different schemes."""
    schemes: dict[str, list[str]] = {}
    for name in members:
        leaf = name.rpartition(".")[2]
        schemes.setdefault(recipe.scheme_of(name).text, []).append(leaf)
    if len(schemes) > 1:
        entry = max(i for i in map(recipe.entry_of, members) if i is not None)
        parts = "; ".join(f"{', '.join(leaves)}: {text}" for text, leaves in schemes.items())
        yield (
            ("layers", entry, "match"),
            f"{group} fuses layers that would have different schemes ({parts}); match all of them "
            "or none",
        )


def _check_divisible(recipe: Recipe, modules: tuple[ModulePlan, ...]) -> Iterator[tuple[Key, str]]:
    """Layers whose inputs are not whole groups, or whose outputs do not fill packed words."""
    for module in modules:
        rows, columns = module.shape
        spec, entry = recipe.scheme_of(module.name).weights, recipe.entry_of(module.name)
        if module.action != "quantize" or spec is None:
            continue
        key: Key = ("scheme", "weights")
        key = key if entry is None else ("layers", entry, *key)
        if spec.group_size is not None and columns % spec.group_size:
            fits = [size for size in (128, 64, 32) if columns % size == 0]
            hint = f"group_size {fits[0]} divides it" if fits else "add the layer to ignore"
            yield (
                (*key, "group_size"),
                f"{spec.group_size} does not divide the {columns} inputs of {module.name}; {hint}",
            )
        if not spec.symmetric and rows % (32 // spec.bits):
            yield (
                (*key, "symmetric"),
                f"zero points are packed {32 // spec.bits} a word, which does not divide the "
                f"{rows} outputs of {module.name}; use symmetric: true or add the layer to ignore",
            )


def _smoothing_groups(
    recipe: Recipe, family: Family, blocks: tuple[str, ...], names: Mapping[str, list[str]]
) -> Iterator[SmoothingGroup]:
    kinds: dict[SmoothingKind, None] = {}
    for method in recipe.methods:
        kinds |= dict.fromkeys(method.smooths)
    for block in blocks:
        yield from smoothing_groups(family, block, names[block], tuple(kinds))


def _summary(checkpoint: Checkpoint, blocks: int) -> ModelSummary:
    dtypes = sorted({str(checkpoint.dtype(n)).removeprefix("torch.") for n in checkpoint.names()})
    return ModelSummary(
        model_type=checkpoint.config["model_type"],
        blocks=blocks,
        parameters=sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names()),
        nbytes=checkpoint.nbytes,
        dtype=", ".join(dtypes),
    )
