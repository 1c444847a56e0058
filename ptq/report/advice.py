"""What to try next: a shipped recipe, chosen by rules from what was measured.

The rules are a table, read from the top; the first that holds decides. Those of `LOSE_LESS` serve a
run that is not clearly good, those of `SAVE_MORE` one that is. What they know of recipes was
measured on the default model (`recipes/RESULTS.md`): another model may answer otherwise, so advice
is something to try.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from calibrate.spec import DatasetSpec
from formats.checkpoint.targets import is_ignored
from formats.families.registry import find_family
from formats.namespace import ROOT
from ptq.recipe.reading import load_recipe
from ptq.recipe.shipped import shipped_paths
from ptq.recipe.strict_yaml import override_value, parse
from ptq.report.data import ReportData
from ptq.report.measured.attribution import Attribution
from ptq.report.outliers import by_ratio, distinct_inputs

MUCH, MOST = 0.35, 0.5  # shares of the loss
WEAKEST = 3  # layers that are named


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    Attributes:
        weights: Their type, or "" where they stay in float.
        activations: `static`, `token`, or "" where they stay in float.
        cache: Its type, or ""; that of values where keys have another.
        methods: Their names.
        mixed: Whether single layers have a scheme of their own.
        budget: Whether a budget chose them.
        two_level: Whether int4 scales have two levels.
        group: Inputs that share a scale of a weight; 0 for all of them.
        per_tensor: Whether a weight has one scale.
        blocks: Whether fp8 weights have a scale for each block.
        shares: Part of the loss that each kind of layer, and the cache, makes; empty where it was
            not measured.
        outlier: How far the largest channel of an input stands out from the median one.
    """

    weights: str
    activations: str
    cache: str
    methods: frozenset[str]
    mixed: bool
    budget: bool
    two_level: bool
    group: int
    per_tensor: bool
    blocks: bool
    shares: dict[str, float]
    outlier: float

    def share(self, kind: str) -> float:
        """Part of the loss that a kind makes; 0 where it is not known."""
        return self.shares.get(kind, 0.0)

    @property
    def int8(self) -> bool:
        """Whether weights and activations are int8."""
        return self.weights == "int8" and self.activations != ""

    @property
    def smooths(self) -> bool:
        """Whether a method evens out the channels of inputs."""
        return bool({"smoothquant", "awq"} & self.methods)


@dataclass(frozen=True)
class Rule:
    """A recipe to try where facts are such, and why; its text may name them."""

    holds: Callable[[Facts], bool]
    recipe: str
    reason: str


LOSE_LESS = (
    Rule(
        lambda f: f.weights == "" and f.cache == "int4",
        "c8",
        "keys and values of 8 bits have 16 times finer steps",
    ),
    Rule(
        lambda f: f.weights == "int4" and f.cache == "int4",
        "a8w4c8",
        "keys and values of 8 bits have 16 times finer steps",
    ),
    Rule(
        lambda f: f.weights == "" and "smooth_k" not in f.methods,
        "c8",
        "nothing evens out the channels of K; this one does",
    ),
    Rule(
        lambda f: f.share("cache") >= MUCH and f.int8 and "smooth_k" not in f.methods,
        "a8w8c8_dynamic_down",
        "the cache makes {cache:.0%} of the loss, and this one evens out the channels of K",
    ),
    Rule(
        lambda f: f.share("cache") >= MUCH and f.int8,
        "a8w8_dynamic",
        "the cache makes {cache:.0%} of the loss; this one leaves it in float",
    ),
    Rule(
        lambda f: f.share("cache") >= MUCH and f.weights == "int4",
        "a8w4",
        "the cache makes {cache:.0%} of the loss; this one leaves it in float",
    ),
    Rule(
        lambda f: f.share("cache") >= MUCH and f.weights == "fp8_e4m3",
        "fp8_channel",
        "the cache makes {cache:.0%} of the loss; this one leaves it in float",
    ),
    Rule(
        lambda f: f.int8 and f.activations == "static" and not f.smooths and f.cache != "",
        "a8w8c8",
        "nothing evens out the channels of inputs, of which one stands out {outlier:.0f} times; "
        "SmoothQuant does",
    ),
    Rule(
        lambda f: f.int8 and f.activations == "static" and not f.smooths,
        "a8w8",
        "nothing evens out the channels of inputs, of which one stands out {outlier:.0f} times; "
        "SmoothQuant does",
    ),
    Rule(
        lambda f: f.int8 and f.activations == "static" and not f.mixed and f.cache != "",
        "a8w8c8_dynamic_down",
        "one static scale holds all tokens; this one scales the inputs of down{down} token by "
        "token, and evens out K",
    ),
    Rule(
        lambda f: f.int8 and f.activations == "static",
        "a8w8_dynamic",
        "one static scale holds all tokens; this one scales every token by itself",
    ),
    Rule(
        lambda f: f.int8,
        "w8_rtn",
        "int8 weights alone: activations stay in float, which is slower for many requests",
    ),
    Rule(
        lambda f: f.budget,
        "w8_rtn",
        "a lower budget gives more layers int8; this one gives it to all of them",
    ),
    Rule(
        lambda f: f.weights == "int4" and not {"gptq", "two_sided"} & f.methods,
        "w4_gptq",
        "GPTQ lets later weights make up for the rounding of earlier ones",
    ),
    Rule(
        lambda f: f.two_level,
        "a8w4",
        "scales of one level lose about 2% less",
    ),
    Rule(
        lambda f: f.weights == "int4" and "refine" not in f.methods,
        "w4_best",
        "gradient descent on roundings and scales, in minutes; activations stay in float",
    ),
    Rule(
        lambda f: f.weights == "int4",
        "budget",
        "nothing that ships makes int4 lose less; a budget gives int8 to the layers that need it",
    ),
    Rule(
        lambda f: f.weights == "fp4_e2m1" and f.group == 32,
        "nvfp4",
        "groups of 16 have scales of finer steps than the powers of two of groups of 32",
    ),
    Rule(
        lambda f: f.weights == "fp4_e2m1",
        "budget",
        "a budget gives 8 bits to the layers that need them, and 4 to the others",
    ),
    Rule(
        lambda f: f.weights == "fp8_e4m3" and f.activations == "",
        "w8_rtn",
        "int8 with a scale for each output channel has finer steps than e4m3",
    ),
    Rule(
        lambda f: f.weights == "fp8_e4m3" and f.per_tensor,
        "fp8_channel",
        "a scale for each output channel and each token in place of one for all",
    ),
    Rule(
        lambda f: f.weights == "fp8_e4m3" and not f.blocks,
        "fp8_block",
        "a scale for each 128 inputs, and GPTQ",
    ),
    Rule(
        lambda f: f.weights == "fp8_e4m3",
        "a8w8_dynamic",
        "int8 has finer steps than fp8 where channels have been evened out",
    ),
)
SAVE_MORE = (
    Rule(
        lambda f: f.weights == "" and f.cache == "int4",
        "a8w4c4_two_level",
        "it has int4 weights, too, and multiplies integers",
    ),
    Rule(lambda f: f.weights == "", "a8w8c8", "it halves the weights, too"),
    Rule(
        lambda f: (f.int8 or f.weights == "fp8_e4m3") and f.cache != "",
        "a8w4c8",
        "it halves the weights again",
    ),
    Rule(lambda f: f.int8, "a8w8c8_dynamic_down", "it halves the cache, too"),
    Rule(lambda f: f.weights == "int8", "w4_best", "it halves the weights again; it takes minutes"),
    Rule(
        lambda f: f.weights in ("int4", "fp4_e2m1") and f.cache == "",
        "a8w4c8",
        "it halves the cache, too, and multiplies integers",
    ),
    Rule(
        lambda f: f.weights == "int4" and f.cache == "int8",
        "a8w4c4_two_level",
        "it halves the cache again",
    ),
    Rule(
        lambda f: f.weights == "fp8_e4m3" and not f.cache,
        "a8w8c8_fp8",
        "it halves the cache, too",
    ),
)


@dataclass(frozen=True)
class Advice:
    """What to try next.

    Attributes:
        recipe: Name of a shipped recipe; "" where none is better.
        reason: Why.
        command: What runs it on the same model and data; "" without a recipe.
    """

    recipe: str
    reason: str
    command: str


def advise(data: ReportData, *, save: bool) -> Advice:
    """The first rule that holds; without one, to leave the weakest layers in float.

    Args:
        data: What was measured.
        save: Whether the run is good, so that more can be saved.
    """
    facts = facts_of(data)
    known = {kind: facts.share(kind) for kind in ("cache", "down")}
    down = f", {known['down']:.0%} of the loss," if known["down"] >= MUCH else ""
    for rule in SAVE_MORE if save else LOSE_LESS:
        if rule.holds(facts) and _runs(data, rule.recipe):
            reason = rule.reason.format(cache=known["cache"], down=down, outlier=facts.outlier)
            return Advice(rule.recipe, reason, _command(data, rule.recipe))
    if save:
        return Advice("", "nothing that ships saves more", "")
    return Advice("", _in_float(data), "")


def facts_of(data: ReportData) -> Facts:
    """What the rules look at."""
    recipe = parse(data.recipe).data
    scheme = recipe["scheme"]
    weights, activations, cache = (
        scheme.get(key) or {} for key in ("weights", "activations", "kv_cache")
    )
    dynamic = activations.get("granularity") in ("per_token", "group")
    rows = by_ratio(distinct_inputs(data.outliers))
    return Facts(
        weights=weights.get("dtype", ""),
        activations="" if not activations else "token" if dynamic else "static",
        cache=cache.get("value_dtype") or cache.get("dtype", ""),
        methods=frozenset(next(iter(method)) for method in recipe.get("methods", [])),
        mixed=bool(recipe.get("layers")),
        budget=bool(recipe.get("budget")),
        two_level=bool(weights.get("two_level")),
        group=weights.get("group_size") or 0,
        per_tensor=weights.get("granularity") == "per_tensor",
        blocks=weights.get("granularity") == "block",
        shares=shares_of(data),
        outlier=(rows[0].ratio or math.nan) if rows else math.nan,
    )


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
    """Whether the methods of a shipped recipe know the model, and its `layers` are there."""
    recipe = load_recipe(shipped_paths()[name])
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
    own = parse(data.recipe).data
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
