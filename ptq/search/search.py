"""Finds what keeps a budget: counts costs once, chooses, and checks on the real kernels.

    run once with the method `costs`      -> OUTPUT/budget: statistics, factors, costs.json
    choose the fewest bytes whose predicted loss keeps the limit (dynamic programming)
    solve that from the statistics, measure it on the evaluation split
    predicted and measured differ by a factor: choose again with it, measure again

Predictions are of second order and of the calibration text, and miss what errors of several layers
have in common: what is measured exceeds them by a factor that hardly depends on the choice, and
that the first measurement shows. At most two choices are measured. Where only bytes are limited,
the first is the best.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch

from calibrate.data import TokenSet
from formats.checkpoint.read import Checkpoint
from formats.checkpoint.targets import is_ignored
from formats.command import say
from formats.errors import RecipeError
from formats.families.block_layers import HEAD
from formats.scheme import LayerScheme
from inference.accuracy import Accuracy
from ptq.evaluate.comparison import compare_on, engine_config, open_both, report_devices
from ptq.methods.common.float_model import FloatModel
from ptq.methods.common.spec import Stage
from ptq.methods.costs import CostsSpec
from ptq.methods.registry import METHODS, view_of
from ptq.output import BUDGET_FOLDER, CHECKPOINT_FOLDER, COSTS_FILE, RECIPE_FILE
from ptq.pipeline import driver
from ptq.pipeline.artifact import Artifact
from ptq.pipeline.reuse import key_of, run_facts
from ptq.plan.machine import devices_of
from ptq.plan.plan import Plan, build_plan
from ptq.plan.preflight import predict_checkpoint, weight_bytes
from ptq.recipe.budget import BudgetSpec
from ptq.recipe.reading import LoadedRecipe, resolved_yaml
from ptq.recipe.schema import LayersSpec, OutputSpec, Recipe, ReportSpec, StatisticsSpec
from ptq.result import QuantizationResult, load_result
from ptq.search.choice import (
    BudgetRecord,
    Curve,
    Frontier,
    Measured,
    Point,
    Trial,
    Tried,
    chosen_recipe,
    frontier,
    loss_of,
)
from ptq.search.costs import HEAD_SCHEMES, SCHEMES, Costs, candidates, gather, groups_of, head_costs
from ptq.text import size_text

TRIALS = 2  # full evaluations
# What measured KL exceeds a prediction by before anything was measured. Predictions are made from
# the calibration text's factors, whose cost `two_sided` itself minimizes: they fall short by more.
EXCESS = {"two_sided": 1.35}
USUAL_EXCESS = 1.2  # of the other ways of rounding
LOG_PERPLEXITY = 0.65  # of the KL divergence, the usual part that ln perplexity rises by
CLOSE = 0.92  # of the limit: a choice that loses more than that, and keeps it, is taken at once
CAREFUL = 0.96  # of the limit is aimed at once the factor is known: it differs a little by choice


@dataclass(frozen=True)
class Ordered:
    """What keeps a budget, or comes next to it.

    Attributes:
        plan: Of the recipe that was chosen.
    """

    plan: Plan
    result: QuantizationResult
    record: BudgetRecord
    accuracy: Accuracy


def count_costs(
    loaded: LoadedRecipe, tokens: TokenSet, *, progress: bool = True
) -> tuple[Costs, Artifact]:
    """Run the samples once for what all candidates cost, or take what an earlier run counted.

    Args:
        loaded: The recipe with the budget.

    Raises:
        RecipeError: the recipe does not fit the model, its methods cannot be solved again, or no
            choice is as small as the budget.
        CheckpointError: the model is damaged, or the output cannot be written.
    """
    assert loaded.recipe.budget is not None
    recipe = counting_recipe(loaded.recipe)
    checkpoint = Checkpoint.open(recipe.model.folder)
    plan = build_plan(recipe, checkpoint, loaded.where, force=True)
    model = view_of(checkpoint, recipe.methods)
    schemes = candidates(loaded.recipe.scheme, loaded.recipe.budget.target)
    _refuse_too_small(loaded.recipe.budget, plan, model, schemes)
    device = devices_of(recipe)[0]
    key = key_of(run_facts(plan, model, tokens.fingerprint, device))
    folder = recipe.output.path
    if (folder / COSTS_FILE).is_file() and (known := Costs.load(folder)).key == key:
        return known, Artifact.load(folder)
    driver.quantize_tokens(plan, tokens, force=True, progress=progress)
    shutil.rmtree(folder / CHECKPOINT_FOLDER)  # it was rounded for nothing but the record
    seen = Artifact.load(folder)
    spec = next(method for method in recipe.methods if isinstance(method, CostsSpec))
    head = None
    if plan.head is not None:
        sequences = driver.in_canonical_order(tokens.sequences())
        head = head_costs(model, HEAD_SCHEMES, sequences, device)
    costs = gather(plan, spec, seen.found, model, list(schemes), key, head)
    costs.save(folder)
    return costs, seen


def _refuse_too_small(
    budget: BudgetSpec, plan: Plan, model: FloatModel, schemes: Mapping[str, LayerScheme]
) -> None:
    """Refuse a size that the smallest candidate in every layer exceeds, before a sample runs.

    Raises:
        RecipeError: it does.
    """
    if budget.of_accuracy:
        return
    smallest, nbytes, elements = dict[str, LayerScheme](), 0, 0
    for layer in (layer for group in groups_of(plan).values() for layer in group):
        own = (HEAD_SCHEMES if layer.name == plan.head else schemes).values()
        sizes = [weight_bytes(scheme, layer.shape, torch.bfloat16) for scheme in own]
        smallest[layer.name] = list(own)[sizes.index(min(sizes))]
        nbytes += min(sizes) * (layer.name != plan.head)
        elements += math.prod(layer.shape) * (layer.name != plan.head)
    caches = [plan.recipe.cache_of(block) for block in plan.blocks]
    whole, bits = predict_checkpoint(model, smallest, caches), 8 * nbytes / elements
    if (whole, bits)[budget.limit[0] == "bits"] > budget.limit[1]:
        raise RecipeError(_unkept(budget, "no choice takes less than", bits, whole, schemes))


def counting_recipe(recipe: Recipe) -> Recipe:
    """The run that a budget begins with: the recipe's methods up to rounding, then `costs`.

    Raises:
        RecipeError: a method after them runs samples, which a choice is solved without.
    """
    assert recipe.budget is not None
    rounding = next(method for method in recipe.methods if method.stage == Stage.ROUND)
    after = [method.name for method in recipe.methods if method.stage > Stage.ROUND]
    if after:
        raise RecipeError(
            f"methods: found {', '.join(after)} after {rounding.name}; with a budget, choices are "
            "solved from statistics, without running samples: leave it out"
        )
    options = rounding.model_dump(mode="json", exclude={"name"})
    schemes = candidates(recipe.scheme, recipe.budget.target)
    costs = CostsSpec(rounding=rounding.name, options=options, schemes=tuple(schemes.values()))
    before = [method for method in recipe.methods if method.stage < Stage.ROUND]
    plain = METHODS["rtn"].model_validate({"name": "rtn"})
    return Recipe.model_validate(
        dict(recipe)
        | {
            "budget": None,
            **_with_head(recipe),
            "methods": (*before, costs, plain),
            "statistics": StatisticsSpec(hessians=True, gradients=True),
            "output": OutputSpec(path=recipe.output.path / BUDGET_FOLDER),
            "report": ReportSpec(),
        }
    )


def _with_head(recipe: Recipe) -> dict[str, object]:
    """The keys by which the run sees what the head reads: it is quantized, if it may be."""
    assert recipe.budget is not None
    others = tuple(entry for entry in recipe.ignore if not is_ignored(HEAD, [entry]))
    if not recipe.budget.counts_head:
        return {"ignore": (HEAD, *others)}
    return {"ignore": others, "layers": (LayersSpec(match=(HEAD,), scheme=SCHEMES["w8"]),)}


def search(loaded: LoadedRecipe, data: Mapping[str, TokenSet], *, progress: bool = True) -> Ordered:
    """Find and quantize what keeps a recipe's budget.

    Args:
        loaded: The recipe with the budget.
        data: Tokens by split.

    Raises:
        RecipeError: as of `count_costs`; or nothing keeps the budget, with what is least.
        CheckpointError: as of `count_costs`.
    """
    costs, seen = count_costs(loaded, data["calibration"], progress=progress)
    assert loaded.recipe.budget is not None
    if loaded.recipe.budget.bits is not None:
        costs = costs.head_in_float
    return _Search(loaded, costs, seen, data["evaluation"], progress).run()


@dataclass
class _Search:
    """A search at work."""

    loaded: LoadedRecipe
    costs: Costs
    seen: Artifact
    evaluation: TokenSet
    progress: bool
    trials: list[Trial] = field(default_factory=list)

    @cached_property
    def measured(self) -> Measured:
        """What was measured of the same costs, now or for another budget."""
        key = f"{self.costs.key} {self.evaluation.fingerprint}"
        return Measured.load(self.seen.folder, key)

    @property
    def budget(self) -> BudgetSpec:
        assert self.loaded.recipe.budget is not None
        return self.loaded.recipe.budget

    def run(self) -> Ordered:
        found = frontier(self.costs.options)
        known = self.measured.excess(self.costs, self.budget)
        factor = known or usual_excess(self.budget, self.costs.rounding)
        for point in choices(found, self.budget, self.costs, self.trials, factor):
            self._try(point, self.trials[-1].excess if self.trials else factor)
        chosen = best(self.trials)
        record = BudgetRecord(
            budget=self.budget,
            costs=self.costs,
            curve=Curve.of(found, self.costs.fixed_bytes),
            trials=tuple(self.trials),
            chosen=chosen,
        )
        plan, result = self._solved(self.trials[chosen].schemes)
        return Ordered(plan, result, record, self.measured.of[self.trials[chosen].key].accuracy)

    def _try(self, point: Point, factor: float) -> None:
        """Quantize a choice and measure it, unless that was done before."""
        groups = zip(self.costs.groups, point.choice, strict=True)
        schemes = tuple(group.candidates[i].scheme for group, i in groups)
        if self.progress:
            say(_told(point, self.costs, factor))
        if ",".join(schemes) not in self.measured.of:
            excess = self.measured.excess(self.costs) or usual_kl_excess(self.costs.rounding)
            _, result = self._solved(schemes)
            accuracy = self._measure(result.checkpoint)
            tried = Tried(accuracy=accuracy, foretold=point.kl * excess)
            self.measured.add(self.seen.folder, schemes, tried)
        tried = self.measured.of[",".join(schemes)]
        accuracy = tried.accuracy
        self.trials.append(
            Trial(
                schemes=schemes,
                nbytes=point.nbytes + self.costs.fixed_bytes,
                predicted=point.kl,
                foretold=tried.foretold,
                kl=accuracy.kl_mean,
                perplexity_ratio=accuracy.perplexity_ratio,
                limit=_scale(self.budget, self.budget.limit[1]),
                measured=loss_of(self.budget, accuracy),
            )
        )

    def _solved(self, schemes: tuple[str, ...]) -> tuple[Plan, QuantizationResult]:
        """The checkpoint of a choice in the output, made again unless it is there."""
        recipe = chosen_recipe(self.loaded.recipe, self.costs, schemes)
        checkpoint = Checkpoint.open(recipe.model.folder)
        plan = build_plan(recipe, checkpoint, self.loaded.where, force=True)
        output = recipe.output.path
        text, path = resolved_yaml(plan.recipe).encode(), output / RECIPE_FILE
        if path.is_file() and path.read_bytes() == text and (output / CHECKPOINT_FOLDER).is_dir():
            return plan, load_result(output)
        return plan, driver.solve(plan, self.seen, force=True, progress=self.progress)

    def _measure(self, checkpoint: Path) -> Accuracy:
        sequences, recipe = self.evaluation.sequences(), self.loaded.recipe
        config = engine_config(self.evaluation, None)
        load = partial(open_both, (recipe.model.folder, checkpoint), config)
        return compare_on(report_devices(recipe), load, sequences, progress=self.progress)


def choices(
    found: Frontier, budget: BudgetSpec, costs: Costs, trials: list[Trial], factor: float
) -> Iterator[Point]:
    """What to measure, one after the other; `trials` grows with what was measured.

    Args:
        factor: What measured loss is of the predicted one, before anything was measured.

    Raises:
        RecipeError: nothing keeps the budget.
    """
    if not budget.of_accuracy:
        yield _within(found, budget, costs)
        return
    limit = _scale(budget, budget.limit[1])
    assert limit is not None
    while len(trials) < TRIALS:
        aim = limit * (CAREFUL if trials else 1.0)
        point = found.smallest(aim / (trials[-1].excess if trials else factor))
        if point is None:
            point = found.point(-1)
            if not trials:
                raise RecipeError(_unreachable(point, budget, costs))
        nbytes = point.nbytes + costs.fixed_bytes
        if any(nbytes == trial.nbytes for trial in trials):
            return
        yield point
        last = trials[-1]
        if last.holds and last.measured >= CLOSE * limit:
            return


def best(trials: list[Trial]) -> int:
    """Index of the smallest that keeps the budget; without one, of that which loses least."""
    holding = [i for i, trial in enumerate(trials) if trial.holds]
    if holding:
        return min(holding, key=lambda i: trials[i].nbytes)
    return min(range(len(trials)), key=lambda i: trials[i].measured)


def usual_kl_excess(rounding: str) -> float:
    """What the measured KL divergence usually is of the predicted one, by the rounding method."""
    return EXCESS.get(rounding, USUAL_EXCESS)


def usual_excess(budget: BudgetSpec, rounding: str) -> float:
    """What the measured loss, in the budget's terms, usually is of the predicted KL divergence."""
    share = LOG_PERPLEXITY if budget.limit[0] == "perplexity_ratio" else 1.0
    return share * usual_kl_excess(rounding)


def _scale(budget: BudgetSpec, value: float) -> float | None:
    """A limit on a scale that grows as KL does; None for limits of bytes."""
    name, _ = budget.limit
    return {"kl": value, "perplexity_ratio": math.log(value)}.get(name) if value > 0 else None


def _within(found: Frontier, budget: BudgetSpec, costs: Costs) -> Point:
    """The least loss of at most so many bytes."""
    name, value = budget.limit
    room = value - costs.fixed_bytes
    if name == "bits":
        head = (group.candidates[0] for group in costs.groups if group.label == costs.head)
        room = value * costs.elements / 8 + sum(cost.nbytes for cost in head)
    point = found.best(int(room))
    if point is None:
        raise RecipeError(_unreachable(found.point(0), budget, costs))
    return point


def _unreachable(least: Point, budget: BudgetSpec, costs: Costs) -> str:
    size = least.nbytes + costs.fixed_bytes
    of_blocks = sum(
        group.candidates[i].nbytes
        for group, i in zip(costs.groups, least.choice, strict=True)
        if group.label != costs.head
    )
    loss = f", a predicted KL divergence of {usual_kl_excess(costs.rounding) * least.kl:.2g} nats"
    what = "the least predicted loss is at" if budget.of_accuracy else "the smallest is"
    return _unkept(budget, what, 8 * of_blocks / costs.elements, size, costs.schemes, loss)


def _unkept(
    budget: BudgetSpec, what: str, bits: float, nbytes: int, schemes: Iterable[str], loss: str = ""
) -> str:
    """Why a budget is refused: what was found, what there is to choose from, what helps."""
    return (
        f"budget: {budget.text} cannot be kept for the target {budget.target}: {what} {bits:.3f} "
        f"bits a weight of the blocks, {size_text(nbytes)} ({nbytes} bytes) with what stays as it "
        f"is{loss}; candidates are {', '.join(schemes)}. Allow more, or use the float model"
    )


def _told(point: Point, costs: Costs, factor: float) -> str:
    """What is to be measured, in a line."""
    groups = zip(costs.groups, point.choice, strict=True)
    counts = Counter(group.candidates[i].scheme for group, i in groups)
    mixed = ", ".join(f"{n} x {name}" for name, n in counts.items())
    size = size_text(point.nbytes + costs.fixed_bytes)
    return f"chosen: {mixed}; {size}, predicted loss {point.kl * factor:.3g}"
