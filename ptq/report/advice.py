"""What to try next: a shipped recipe, chosen by what recipes are known to cost.

Figures are those of the nearest model that was measured (`ptq.report.known`): another one may
answer otherwise, so advice is something to try. To lose less, the fewest bits more are taken that
lose clearly less; to save more, of those with fewer bits what loses least. Recipes that lose about
the same are distinguished by the time that they take.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

from calibrate.spec import DatasetSpec
from formats.checkpoint.targets import is_ignored, last_match
from formats.families.registry import find_family
from formats.namespace import ROOT
from formats.scheme import SUPER_BLOCK, Scheme
from ptq.recipe.own_model import shipped_paths
from ptq.recipe.reading import load_recipe
from ptq.recipe.schema import Recipe
from ptq.recipe.strict_yaml import override_value
from ptq.report.attribution import Attribution
from ptq.report.data import ReportData, known_methods, methods_of, recipe_values
from ptq.report.inspection import distinct_inputs
from ptq.report.known import Known, known_figures

CLEARLY = 0.8  # of a loss; what loses more is no help
ALIKE = 1.1  # losses within this factor are about the same
MUCH = 0.35  # share of the loss
WEAKEST = 3  # layers that are named
EVENING = {"rotation", "awq", "smoothquant"}  # methods that make channels alike
UNEVEN = 25.0  # times the median channel: in SmolLM2 and Gemma 3 half of the inputs have 9 at most


@dataclass(frozen=True)
class Bits:
    """What a scheme stores: bits of a weight with its part of a group's scale, and of a cached
    number; float ones have 16.
    """

    weights: float
    cache: float
    integers: bool  # whether inputs of layers are quantized, too

    @property
    def total(self) -> float:
        """How much is stored, roughly."""
        return self.weights + self.cache


@dataclass(frozen=True)
class Advice:
    """What to try next.

    Attributes:
        recipe: Name of a shipped recipe; "" where none is better.
        command: What runs it on the same model and data; "" without a recipe.
    """

    recipe: str
    reason: str
    command: str


def advise(data: ReportData, *, save: bool) -> Advice:
    """A recipe that loses less, or one that saves more; without one, to leave the weakest layers in
    float.

    Args:
        save: Whether the run is good, so that more can be saved.
    """
    find = _smaller if save else _better
    known = [(rows, _own(data, rows)) for rows in _models(data)]
    for rows, own in sorted(known, key=lambda pair: pair[1] is None):  # first like with like
        found = find(data, [row for row in rows if row != own and _runs(data, row.recipe)], own)
        if found is not None:
            reason = f"on {found.title} it lost {found.kl:.3g}"
            if own is not None:
                reason += f", where `{own.recipe}` lost {own.kl:.3g}"
            reason += _kept(own_bits(data), recipe_bits(found.recipe, most_inputs(data)))
            reason += "" if save else _uneven(data)
            return Advice(found.recipe, reason, _command(data, found.recipe))
    reason = "nothing that was measured saves more" if save else _in_float(data) + _uneven(data)
    return Advice("", reason, "")


def _uneven(data: ReportData) -> str:
    """That channels of most inputs stand out as in no model that was measured, and what evens them,
    where weights of 4 bits meet them as they are.
    """
    ratios = [row.ratio for row in distinct_inputs(data.outliers) if row.ratio is not None]
    uneven = median(ratios) if ratios else 0.0
    evened = not EVENING.isdisjoint(methods_of(data.recipe))
    if uneven < UNEVEN or evened or own_bits(data).weights > 5:
        return ""
    return (
        f"; the largest channel of an input is mostly {uneven:.0f} times its median one: "
        "the method `rotation`, as in w4_rotated, evens such channels"
    )


def _models(data: ReportData) -> Iterator[list[Known]]:
    """What was measured on each model, the nearest one first."""
    known = [row for row in known_figures() if not (row.flattered or row.ordered)]
    rows = [row for row in known if row.recipe in shipped_paths()]
    ranked = sorted(rows, key=lambda row: (row.distance(data.model), row.model))
    for name in dict.fromkeys(row.model for row in ranked):
        yield [row for row in ranked if row.model == name]


def _own(data: ReportData, rows: Sequence[Known]) -> Known | None:
    """What this run's scheme and methods lost on one of these models, whose layers may have others
    of the groups that a recipe fits to a model.
    """
    own, methods = recipe_values(data.recipe), known_methods(data.recipe)
    schemes = [own["scheme"], *(entry["scheme"] for entry in own.get("layers", ()))]
    inputs = {row.shape[1] for row in data.quantization.modules}

    def alike(row: Known) -> bool:
        shipped = _shipped(row.recipe)
        fitted = [shipped.scheme.fitted(size).model_dump(mode="json") for size in inputs]
        fit = all(any(one.items() <= other.items() for other in fitted) for one in schemes)
        return row.scheme == data.scheme or (fit and not shipped.layers)

    return next((row for row in rows if row.methods == methods and alike(row)), None)


def _better(data: ReportData, rows: Sequence[Known], own: Known | None) -> Known | None:
    """What loses clearly less, with no fewer bits: as few more as there are. Where the cache makes
    much of the loss, one with more bits there.
    """
    mine, loss = own_bits(data), data.accuracy.kl_mean if own is None else own.kl
    inputs = most_inputs(data)
    others = [
        (row, bits)
        for row in rows
        if row.kl < CLEARLY * loss
        and int((bits := recipe_bits(row.recipe, inputs)).weights) >= int(mine.weights)
        and bits.cache >= mine.cache
    ]
    if shares_of(data).get("cache", 0.0) >= MUCH:
        others = [pair for pair in others if pair[1].cache > mine.cache] or others
    if not others:
        return None
    fewest = min(_price(bits, mine) for _, bits in others)
    return _quickest([row for row, bits in others if _price(bits, mine) == fewest])


def _price(bits: Bits, mine: Bits) -> tuple[float, bool]:
    """What a recipe takes more: bits, and products of floats in the place of integers."""
    return bits.total, mine.integers and not bits.integers


def _smaller(data: ReportData, rows: Sequence[Known], own: Known | None) -> Known | None:
    """What loses least of those with fewer bits."""
    del own
    mine, inputs = own_bits(data), most_inputs(data)
    others = [
        row
        for row in rows
        if (bits := recipe_bits(row.recipe, inputs)).total < mine.total
        and bits.weights <= mine.weights
        and bits.cache <= mine.cache
    ]
    return _quickest(others) if others else None


def _quickest(rows: Sequence[Known]) -> Known:
    """Of those that lose about the least, the one that takes the least time."""
    least = min(row.kl for row in rows)
    alike = [row for row in rows if row.kl <= ALIKE * least]
    return min(alike, key=lambda row: (row.seconds or 0.0, row.kl))


def _kept(mine: Bits, other: Bits) -> str:
    """How another recipe's bits differ."""
    what = [
        f"{name} of {theirs:.4g} bits in place of {own:.4g}"
        for name, own, theirs in (
            ("weights", mine.weights, other.weights),
            ("a cache", mine.cache, other.cache),
        )
        if own != theirs
    ]
    if mine.integers and not other.integers:
        what.append("inputs of layers in float")
    return f"; {', '.join(what)}" if what else ""


def own_bits(data: ReportData) -> Bits:
    """What a run's scheme stores; where layers have weights of other bits, of these the mean."""
    values = recipe_values(data.recipe)
    layers = values.get("layers", ())

    def bits(own: dict[str, Any], inputs: int) -> Bits:
        scheme = Scheme.model_validate_json(json.dumps(values["scheme"] | own))
        return bits_of(scheme.fitted(inputs))

    whole, total = bits({}, most_inputs(data)), Counter[float]()
    for row in data.quantization.modules:
        entry = last_match(row.module, (e["match"] for e in layers))
        own = {} if entry is None else layers[entry]["scheme"]
        total[bits(own, row.shape[1]).weights] += math.prod(row.shape)
    if all(int(each) == int(whole.weights) for each in total):
        return whole
    mean = sum(each * count for each, count in total.items()) / total.total()
    return replace(whole, weights=mean)


def most_inputs(data: ReportData) -> int:
    """Inputs of most weights, which settle the groups that a recipe leaves open."""
    counts = Counter[int]()
    for row in data.quantization.modules:
        counts[row.shape[1]] += math.prod(row.shape)
    return counts.most_common(1)[0][0] if counts else SUPER_BLOCK


def bits_of(scheme: Scheme) -> Bits:
    """What a scheme of settled groups stores; layers and caches with others of their own aside."""
    spec, kv = scheme.weights, scheme.kv_cache
    weights = 16.0
    if spec is not None:
        scale = 16 if spec.dtype.startswith("int") else 8
        weights = spec.bits + (scale / spec.block[1] if spec.block[1] > 0 else 0)
    return Bits(
        weights=weights,
        cache=16 if kv is None else (kv.bits_of("k_cache") + kv.bits_of("v_cache")) / 2,
        integers=scheme.activations is not None,
    )


def recipe_bits(name: str, inputs: int = SUPER_BLOCK) -> Bits:
    """Those of a shipped recipe where most layers have so many inputs; default any groups fit."""
    return bits_of(_shipped(name).scheme.fitted(inputs))


@cache
def _shipped(name: str) -> Recipe:
    return load_recipe(shipped_paths()[name])


def shares_of(data: ReportData) -> dict[str, float]:
    """Each kind's part of the loss, the largest first; empty where it was not measured."""
    if not isinstance(data.attribution, Attribution):
        return {}
    kinds = data.attribution.kinds
    total = sum(part.kl for part in kinds)
    ranked = sorted(kinds, key=lambda part: -part.kl)
    return {part.name: part.kl / total for part in ranked} if total else {}


def weakest(data: ReportData) -> list[tuple[str, float]]:
    """Layers whose output (or, where it was not measured, weight) is noisiest, with its dB."""
    rows = data.quantization.modules
    measured = any(row.output_sqnr_db is not None for row in rows)
    key = "output_sqnr_db" if measured else "weight_sqnr_db"
    ratios = [(row.module, getattr(row, key)) for row in rows]
    return sorted((r for r in ratios if r[1] is not None), key=lambda row: row[1])[:WEAKEST]


def _runs(data: ReportData, name: str) -> bool:
    """Whether the methods of a shipped recipe know the model, and its `layers` are there; one with
    a budget, whose bits follow from the model, is not compared.
    """
    recipe = _shipped(name)
    if recipe.budget is not None:
        return False
    family = find_family({"model_type": data.model.model_type})
    modules = [row.module for row in data.quantization.modules]
    found = all(
        any(is_ignored(module, [pattern]) for module in modules)
        for entry in recipe.layers
        for pattern in entry.match
    )
    return found and all(method.knows(family) for method in recipe.methods)


def _in_float(data: ReportData) -> str:
    names = [name for name, _ in weakest(data)]
    if not names:
        return "no shipped recipe loses less"
    kept = json.dumps(["lm_head", *names])
    return (
        "no shipped recipe loses less; leave the weakest layers in float: "
        f"--set {shlex.quote(f'ignore={kept}')}"
    )


def _command(data: ReportData, recipe: str) -> str:
    """A shipped recipe on the same model and data, as a command to paste."""
    words = ["ptq", "run", recipe]
    own = recipe_values(data.recipe)
    if own["model"]["path"] != str(ROOT / "recipes" / "tiny-python"):
        words += _settings("model", own["model"], {})
    defaults = DatasetSpec().model_dump(mode="json")
    words += _settings("dataset", own["dataset"], defaults)
    return shlex.join([*words, "--output", f"output/{recipe}"])


def _settings(key: str, values: dict[str, Any], defaults: dict[str, Any]) -> Sequence[str]:
    """`--set` for each value that is not the default; what is missing is null by default."""
    words = []
    for name, value in values.items():
        if value != defaults.get(name):
            words += ["--set", f"{key}.{name}={override_value(value)}"]
    return words
