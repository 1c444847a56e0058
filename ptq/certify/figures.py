"""A certificate's figures: what was found of both models, how it was tested, and the verdict.

Every part of the measurement gives rows, one a case: {name: (original, quantized)}. Figures follow
from rows and from `SPECS` alone, so that their statistics are tested without a model.

    green      the loss is within its limit
    amber      it is beyond the limit, which may be chance; of yes and no, with p below 5%
    red        the whole interval is beyond the limit, and so says the test, corrected by Holm
    untested   the original itself cannot do it, or there were too few cases
    shown      a figure without a limit
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import Field

from formats.scheme import Strict
from inference.accuracy import STRANGE
from ptq.certify.statistics import (
    Floats,
    Interval,
    holm,
    mcnemar,
    mean_interval,
    quantile,
    share_interval,
    sign_flip,
)

Kind = Literal["mean", "apart", "share", "quantile", "shown"]
Light = Literal["green", "amber", "red", "untested", "shown"]
LEVEL = 0.05
FEWEST = 6  # cases


class Row(Strict):
    """What both models made of one case.

    Attributes:
        values: By the figure's name: the original's and the quantized model's.
        counts: Histogram of the KL divergence of its predictions, for quantiles.
        length: Tokens of the context, where that is what is asked about.
        depth: Where in it the answer stands, from 0 to 1.
    """

    case: str
    values: dict[str, tuple[float, float]]
    counts: dict[int, int] = Field(default_factory=dict)
    length: int = 0
    depth: float = 0.0


Rows = dict[str, list[list[Row]]]  # of each part, of each of its cases


class Figure(Strict):
    """One figure; the difference is the quantized model's less the original's.

    Attributes:
        name: One word with dots.
        interval: 95% interval of the difference.
        limit: How far it may rise, or, where less is worse, fall (then negative).
        test: The test's name; empty where there is none.
        p: That a difference within the limit comes out as far off.
        corrected: The same for all figures together.
        reason: Of the verdict, in a sentence.
    """

    name: str
    title: str
    original: float | None
    quantized: float | None
    difference: float | None
    interval: Interval | None
    limit: float | None
    test: str
    p: float | None
    corrected: float | None = None
    cases: int
    verdict: Light = "untested"
    reason: str = ""


@dataclass(frozen=True)
class Spec:
    """How a figure is judged.

    Attributes:
        kind: `mean` of what may rise or fall, `apart` of what may do neither, `share` of yes among
            cases, `quantile` of KL divergences, or `shown`.
        limit: Most that may be lost.
        falls: Whether a loss is a fall.
        least: Share that the original must reach for the figure to tell anything.
        share: Of a quantile.
        scale: Whether the limit goes with that of the mean KL divergence, times `limit`.
    """

    title: str
    kind: Kind
    limit: float = 0.0
    falls: bool = False
    least: float = 0.2
    share: float = 0.0
    scale: bool = False


MEAN_KL = 0.05  # nats, where nothing is known of the checkpoint's scheme
KNOWN_CHOICE = 0.4  # of four, where chance has 0.25: 20% beyond chance
PLACES = ((0, 64), (64, 512), (512, 4096), (4096, 32768))
_PLACE = ["the first 64 tokens", "tokens 64 to 511", "tokens 512 to 4,095", "tokens from 4,096 on"]
SPECS: dict[str, Spec] = {
    "kl.mean": Spec("mean KL divergence", "mean", 1, scale=True),
    "kl.p99": Spec("KL divergence, 99%", "quantile", 12, share=0.99, scale=True),
    "kl.p999": Spec("KL divergence, 99.9%", "quantile", 40, share=0.999, scale=True),
    **{f"kl.{kind}": Spec(f"KL of {kind}", "mean", 1.2, scale=True) for kind in ("prose", "code")},
    "kl.prompts": Spec("KL of your prompts", "mean", 1.2, scale=True),
    "kl.chat": Spec("KL of the original's own answers", "mean", 1.2, scale=True),
    # To a model that was trained with a template what follows its tokens is all but certain.
    "kl.turns": Spec("KL over surprisal after the template's tokens", "mean", 2, scale=True),
    **{
        f"kl.at_{start}": Spec(f"KL of {place}", "mean", 1.2 if start else 2, scale=True)
        for (start, _), place in zip(PLACES, _PLACE, strict=True)
    },
    **{
        f"perplexity.at_{start}": Spec(f"log perplexity of {place}", "mean", 0.05)
        for (start, _), place in zip(PLACES, _PLACE, strict=True)
    },
    "answers.equal": Spec("greedy answers equal to the original's", "shown"),
    "answers.drawn_equal": Spec("sampled answers equal, of equal seeds", "shown"),
    "answers.first_difference": Spec("tokens before the first other one", "shown"),
    "answers.no_loop": Spec("answers that end in no loop", "share", 0.05, falls=True),
    "answers.ended": Spec("answers that end by themselves", "share", 0.05, falls=True),
    "answers.length": Spec("log length of answers", "apart", 0.25),
    "answers.end": Spec("log probability of the end where it is due", "mean", 0.2, falls=True),
    "objects.parse": Spec("calls or JSON that parse", "share", 0.05, falls=True),
    "objects.fit": Spec("calls or JSON that fit the schema", "share", 0.05, falls=True),
    "objects.right": Spec("calls or JSON with the right values", "share", 0.05, falls=True),
    "objects.likelihood": Spec("log probability of right JSON, a token", "mean", 0.05, falls=True),
}
TASKS = {"python_cloze": 0.2, "python_choice": 0.4, "python_pairs": 0.6}  # 20% beyond chance
for _task, _least in TASKS.items():
    SPECS[f"tasks.{_task}"] = Spec(f"{_task}: right", "share", 0.05, falls=True, least=_least)
for _task, _what in (
    ("needle", "a fact in a long text"),
    ("keys", "a value of a long list"),
    ("trace", "a variable through assignments"),
):
    SPECS[f"{_task}.chosen"] = Spec(
        f"{_what}: right of four", "share", 0.05, falls=True, least=KNOWN_CHOICE
    )
    SPECS[f"{_task}.said"] = Spec(f"{_what}: answered", "share", 0.05, falls=True)
    SPECS[f"{_task}.margin"] = Spec(f"{_what}: margin, nats", "mean", 0.25, falls=True)


def judge(rows: Iterable[Row], mean_kl: float = MEAN_KL) -> list[Figure]:
    """All figures that the rows tell of, in the order of `SPECS`, with their verdicts.

    Args:
        mean_kl: Limit of the mean KL divergence, which others go by.
    """
    values, counts = defaultdict[str, list[tuple[float, float]]](list), list[dict[int, int]]()
    for row in rows:
        for name, both in row.values.items():
            values[name].append(both)
        counts += [row.counts] if row.counts else []
    figures = []
    for name, spec in SPECS.items():
        own = replace(spec, limit=spec.limit * mean_kl) if spec.scale else spec
        if own.kind == "quantile" and counts:
            figures.append(_of_quantile(name, own, counts))
        elif name in values:
            original, quantized = np.array(values[name], dtype=np.float64).T
            figures.append(_of_pairs(name, own, original, quantized))
    return _with_verdicts(_without_what_is_not_known(figures))


def _of_quantile(name: str, spec: Spec, counts: Sequence[dict[int, int]]) -> Figure:
    found, drawn = quantile(counts, spec.share)
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    return Figure(
        name=name, title=spec.title, original=0.0, quantized=found, difference=found,
        interval=(low, high) if len(counts) > 1 else None, limit=spec.limit,
        test="bootstrap", p=float(1 + (drawn <= spec.limit).sum()) / (1 + len(drawn)),
        cases=len(counts),
    )  # fmt: skip


def _of_pairs(name: str, spec: Spec, original: Floats, quantized: Floats) -> Figure:
    sign, apart = -1.0 if spec.falls else 1.0, quantized - original
    interval, test, p = mean_interval(apart), "sign-flip", None
    limit = None if spec.kind == "shown" else sign * spec.limit
    if spec.kind == "share":
        interval, test = share_interval(original, quantized), "McNemar, exact"
        p = mcnemar(original, quantized)
    elif spec.kind == "mean":
        p = sign_flip(sign * apart, spec.limit)
    elif spec.kind == "apart":
        p = min(1.0, 2 * min(sign_flip(side * apart, spec.limit) for side in (1.0, -1.0)))
    known = spec.kind != "share" or original.mean() >= spec.least
    figure = Figure(
        name=name, title=spec.title, original=float(original.mean()),
        quantized=float(quantized.mean()), difference=float(apart.mean()), interval=interval,
        limit=limit, test="" if p is None else test, p=p if known else None, cases=len(apart),
    )  # fmt: skip
    if known:
        return figure
    found = f"the original itself succeeds in {original.mean():.0%} of cases"
    return figure.model_copy(update={"reason": f"{found}; {spec.least:.0%} are needed"})


def _without_what_is_not_known(figures: Sequence[Figure]) -> list[Figure]:
    """No verdict where cases are few, or by the margin of a task that the original cannot do."""
    chosen = {f.name.partition(".")[0]: f for f in figures if f.name.endswith(".chosen")}
    made = []
    for figure in figures:
        reason, task = figure.reason, chosen.get(figure.name.partition(".")[0])
        if figure.cases < FEWEST and figure.test:
            reason = f"{figure.cases} cases are too few; {FEWEST} are needed"
        elif figure.name.endswith(".margin") and task is not None and task.p is None:
            reason = task.reason
        if reason:
            figure = figure.model_copy(update={"p": None, "reason": reason})
        made.append(figure)
    return made


def _with_verdicts(figures: Sequence[Figure]) -> list[Figure]:
    corrected = iter(holm([f.p for f in figures if f.p is not None]))
    made = []
    for figure in figures:
        p = next(corrected) if figure.p is not None else None
        light, reason = _verdict(figure, p)
        made.append(figure.model_copy(update={"corrected": p, "verdict": light, "reason": reason}))
    return made


def _verdict(figure: Figure, corrected: float | None) -> tuple[Light, str]:
    if figure.limit is None:
        return "shown", "it has no limit: one other token changes all that follow"
    if figure.p is None or corrected is None or figure.difference is None:
        return "untested", figure.reason
    away, bound = figure.difference, figure.limit
    beyond = _loss(figure) > abs(bound)
    against = f"{away:+.3g} against a limit of {bound:+.3g}"
    if corrected < LEVEL and beyond and _all_beyond(figure):
        return "red", f"{against}: the whole interval is a loss, p {corrected:.2g} by {figure.test}"
    if beyond and (figure.p < LEVEL or not figure.test.startswith("McNemar")):
        return "amber", f"{against}, which may be chance: p {figure.p:.2g}, {corrected:.2g} of all"
    return "green", against


def _loss(figure: Figure) -> float:
    """How much is lost: of what may neither rise nor fall, how far it is off."""
    assert figure.difference is not None
    assert figure.limit is not None
    if SPECS[figure.name].kind == "apart":
        return abs(figure.difference)
    return float(np.copysign(1, figure.limit)) * figure.difference


def _all_beyond(figure: Figure) -> bool:
    """Whether the interval is beyond the limit; of shares, which are coarse, beyond none."""
    if figure.interval is None or figure.difference is None or figure.limit is None:
        return False
    bound = 0.0 if figure.test.startswith("McNemar") else abs(figure.limit)
    side = np.sign(figure.difference)
    return bool(min(side * figure.interval[0], side * figure.interval[1]) > bound)


def overall(figures: Sequence[Figure]) -> tuple[Light, str]:
    """The verdict of all figures, and a sentence that names those it comes from."""
    by = {light: [f for f in figures if f.verdict == light] for light in ("red", "amber", "green")}
    untested = sum(f.verdict == "untested" for f in figures)
    rest = f"; {untested} untested, as the original itself cannot do them" if untested else ""
    rest += f".{_strange_original(figures)}"
    for light in ("red", "amber"):
        if by[light]:
            names = ", ".join(f.name for f in by[light])
            return light, f"{light.capitalize()}: {names} of {len(figures)} figures{rest}"
    if not by["green"]:
        return "untested", "Untested: there was nothing that the original can do."
    return "green", f"Green: all {len(by['green'])} figures with a limit keep it{rest}"


def _strange_original(figures: Sequence[Figure]) -> str:
    """A sentence where texts mean nothing to the original, as with another model's tokenizer."""
    known = [f.original for f in figures if f.name.startswith("perplexity.at_")]
    least = min((x for x in known if x is not None), default=0.0)
    if least <= np.log(STRANGE):
        return ""
    return (
        f" Careful: the original itself has a perplexity of {np.exp(least):,.0f} or more on these "
        "texts; its tokenizer may not be the one it was trained with."
    )


def mean_by(
    rows: Iterable[Row], name: str, key: Literal["length", "depth"]
) -> Mapping[float, tuple[float, float]]:
    """Means of a value of both models, by the rows' length or depth."""
    found = defaultdict[float, list[tuple[float, float]]](list)
    for row in rows:
        if name in row.values:
            found[getattr(row, key)].append(row.values[name])
    means = {key: np.mean(own, axis=0).tolist() for key, own in sorted(found.items())}
    return {key: (own[0], own[1]) for key, own in means.items()}
