"""The verdict in words: whether the limits hold, by how much, and whether that is certain.

Limits are the recipe's thresholds. Where it has none, the limit is what its scheme by its methods
is known to have lost on the nearest model, with a margin (`ptq.report.known`).

green   every limit holds, and is beyond the 95% interval of its figure
amber   every limit holds, but within what chance may do: other text could tell otherwise
red     a threshold is missed, or the whole interval is beyond what is known
grey    the recipe sets no thresholds, and nothing is known of its scheme
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from inference.accuracy import STRANGE, Accuracy, Interval
from ptq.report.data import LABELS, AlsoMeasured, Check, ReportData, keeps, method_names
from ptq.report.known import MARGIN, Known, beside_margin
from ptq.report.page import Cells, Table
from ptq.text import percent, size_text

UNEVEN = 1.5  # times as much, which one kind of text may lose
FEWEST_SEQUENCES, FEWEST_TOKENS = 8, 2000  # below these, intervals themselves are not to be trusted


@dataclass(frozen=True)
class Verdict:
    """The outcome.

    Attributes:
        light: `green`, `amber`, `red` or `grey`.
        outcome: `passed`, `failed`, or `open` where there is no limit.
        margins: For each limit, whether it holds and by how much.
        doubts: Why the evaluation may be too small to tell.
    """

    light: str
    outcome: str
    headline: str
    margins: tuple[str, ...]
    doubts: tuple[str, ...]


def verdict_of(data: ReportData) -> Verdict:
    """Judge what was measured."""
    intervals = _intervals(data.accuracy)
    margins = tuple(_margin(check, intervals[check.name], data.known) for check in data.checks)
    unsure = [check for check in data.checks if _is_unsure(check, intervals[check.name])]
    doubts = tuple(_doubts(data, unsure))
    if not data.checks:
        headline = (
            "No verdict: the recipe sets no thresholds, and no other model has a loss of "
            f"`{data.scheme}` by {method_names(data.recipe)} to compare this one with."
        )
        return Verdict("grey", "open", headline, margins, doubts)
    if data.failures:
        missed = f"{len(data.failures)} of {len(data.checks)} thresholds missed"
        if data.known is not None:
            missed = f"it loses more than is expected of `{data.known.recipe}`"
        return Verdict("red", "failed", f"Red: {missed}.", margins, doubts)
    all_hold = "every threshold holds" if len(data.checks) > 1 else "the threshold holds"
    if data.known is not None:
        all_hold = f"it loses no more than is expected of `{data.known.recipe}`"
    if unsure:
        if data.known is not None and any(map(_beyond, data.checks)):
            all_hold = f"it loses more than is expected of `{data.known.recipe}`"
        headline = f"Amber: {all_hold}, but by less than the measurement can tell."
        return Verdict("amber", "passed", headline, margins, doubts)
    return Verdict("green", "passed", f"Green: {all_hold}.", margins, doubts)


def _intervals(a: Accuracy) -> dict[str, Interval | None]:
    return {
        "perplexity_ratio": a.perplexity_ratio_ci,
        "kl": a.kl_mean_ci,
        "top1_agreement": a.top1_agreement_ci,
    }


def _half(ends: Interval | None) -> float:
    """Half of an interval's width; endless where it is not known."""
    return math.inf if ends is None else (ends[1] - ends[0]) / 2


def _is_unsure(check: Check, ends: Interval | None) -> bool:
    """Whether the threshold is within the figure's interval."""
    return ends is None or ends[0] <= check.limit <= ends[1]


def _beyond(check: Check) -> bool:
    """Whether the figure itself misses the limit; of what is known it may hold all the same."""
    return not keeps(check.measured, check.limit, check.upper)


def _margin(check: Check, ends: Interval | None, known: Known | None) -> str:
    """A sentence on a limit, such as `perplexity ratio 1.0038 (95% interval 1.0023 to 1.0055)
    keeps the threshold 1.01 by 3.9 times half that interval's width`.
    """
    digits = 4 if abs(check.measured) >= 0.1 else 5
    shown = [f"{x:.{digits}f}" for x in (check.measured, *(ends or ()))]
    interval = f" (95% interval {shown[1]} to {shown[2]})" if ends is not None else ""
    if known is not None:
        return (
            f"{LABELS[check.name]} {shown[0]}{interval}; `{known.recipe}` lost {known.kl:.3g} on "
            f"{known.title}, and up to {MARGIN:g} times that"
            f"{beside_margin(known.kl, check.limit)} is as expected"
        )
    text = (
        f"{LABELS[check.name]} {shown[0]}{interval} {'keeps' if check.holds else 'misses'} the "
        f"threshold {check.limit:g}"
    )
    distance, half = abs(check.measured - check.limit), _half(ends)
    if half == 0 or not math.isfinite(distance + half):
        return text
    return f"{text} by {distance / half:.2g} times half that interval's width"


def strange_original(accuracy: Accuracy) -> str:
    """What is wrong where the original itself does not know the text; "" where it does."""
    found = accuracy.perplexity_original
    if found <= STRANGE:
        return ""
    return (
        f"the original itself has a perplexity of {found:,.0f} on this text: its tokenizer may not "
        "be the one it was trained with (does it put the token first that texts begin with?), or "
        "the text is of no kind that it knows. The loss says little then"
    )


def _doubts(data: ReportData, unsure: list[Check]) -> Iterator[str]:
    a = data.accuracy
    if data.quantization.calibration.warning:
        yield data.quantization.calibration.warning
    if doubt := strange_original(a):
        yield doubt
    if data.also is not None:
        yield from _other_kind(data.also, data)
    few = a.sequences < FEWEST_SEQUENCES or a.tokens < FEWEST_TOKENS
    if few:
        yield (
            f"{a.sequences} sequences with {a.tokens:,} predictions are too few to trust: give at "
            f"least {FEWEST_SEQUENCES} sequences and {FEWEST_TOKENS:,} predictions "
            "(dataset.evaluation.samples)"
        )
    if data.further is not None and data.further.kl_mean > UNEVEN * a.kl_mean > 0:
        times = data.further.kl_mean / a.kl_mean
        yield (
            f"{_further_name(data)} of a text lose {times:.1f} times what "
            "shorter texts do: the cache loses more far into a context; `ptq certify` shows where"
        )
    if not unsure:
        return
    names = " and ".join(LABELS[check.name] for check in unsure)
    wanted = max(_wanted(check, _intervals(a)[check.name], a.sequences) for check in unsure)
    advice = f"; about {wanted:,} sequences would tell" if wanted else ""
    yield (
        f"the 95% interval of {names} reaches over the limit: {a.sequences} sequences cannot "
        f"tell it from one that is {'kept' if any(map(_beyond, unsure)) else 'missed'}{advice}"
    )


def _other_kind(also: AlsoMeasured, data: ReportData) -> Iterator[str]:
    """That one kind of text loses far more than the other."""
    figures = {
        data.evaluation.kind_name: data.accuracy.kl_mean,
        also.text.kind_name: also.accuracy.kl_mean,
    }
    (worse, most), (better, least) = sorted(figures.items(), key=lambda row: -row[1])
    if len(figures) > 1 and most > UNEVEN * least:
        yield (
            f"{worse} loses {most / least:.1f} times what {better} does (mean KL {most:.2g} and "
            f"{least:.2g}); calibrate on text like that which the model will meet"
        )


def _wanted(check: Check, ends: Interval | None, sequences: int) -> int:
    """Sequences whose interval would end at the threshold: widths go with 1 / sqrt(sequences).

    0 where that is not known, or is beyond reason.
    """
    distance = abs(check.measured - check.limit)
    if ends is None or distance == 0 or not math.isfinite(distance + _half(ends)):
        return 0
    wanted = sequences * (_half(ends) / distance) ** 2
    return math.ceil(1.2 * wanted) if wanted < 100 * sequences else 0


def summary_rows(data: ReportData) -> list[Cells]:
    """The table that ends a run: head and rows of (what, original, quantized, change)."""
    a, s = data.accuracy, data.sizes
    rows = [
        ("", "original", "quantized", "change"),
        _ratio_row("weights", s.original_weights, s.quantized_weights, size_text),
        _ratio_row("cache per token", s.original_kv, s.quantized_kv, size_text),
        (
            "perplexity",
            f"{a.perplexity_original:.4g}",
            f"{a.perplexity_quantized:.4g}",
            f"x {a.perplexity_ratio:.4f}",
        ),
        ("mean KL (nats)", "", f"{a.kl_mean:.2g}", ""),
        *((f"mean KL, {kind}", "", f"{own.kl_mean:.2g}", "") for kind, own in other_texts(data)),
        ("top-1 agreement", "", percent(a.top1_agreement), ""),
        ("top-5 agreement", "", percent(a.top5_agreement), ""),
    ]
    if data.states is not None:
        sizes = data.states.float_bytes, data.states.int8_bytes
        kl = data.states.accuracy.kl_mean
        rows.append(("mean KL of int8 states", "", f"{kl:.2g}", ""))
        rows.append(_ratio_row("kept state of a sequence", *sizes, size_text))
    if data.drafts is not None:
        o, q = data.drafts.original, data.drafts.quantized
        rows.append(_ratio_row("tokens a step, mtp drafts", o, q, lambda x: f"{x:.2f}"))
    if data.speed is not None:
        o, q = data.speed.original, data.speed.quantized
        for phase, key in (("prefill", "prefill_tokens_s"), ("decode", "decode_tokens_s")):
            before, after = getattr(o, key).median, getattr(q, key).median
            name = f"{phase} tokens/s" + (", loaded machine" if data.speed.loaded else "")
            rows.append(_ratio_row(name, before, after, lambda x: f"{x:.0f}"))
    return rows


def other_texts(data: ReportData) -> list[tuple[str, Accuracy]]:
    """What was measured beside the evaluation's windows, by what it is: text of another kind, and
    what stands further in a text, if there are."""
    found = [] if data.also is None else [(data.also.text.kind_name, data.also.accuracy)]
    return found if data.further is None else [*found, (_further_name(data), data.further)]


def _further_name(data: ReportData) -> str:
    """What `further` was measured on, such as `tokens 512 to 4,095`."""
    assert data.further is not None
    start = data.accuracy.positions[-1].end + 1
    return f"tokens {start:,} to {start + data.further.tokens:,}"


def check_rows(data: ReportData) -> Table:
    """Limits beside what was measured."""
    return Table(
        ("limit" if data.known else "threshold", "measured", "allowed", "verdict"),
        [
            (
                LABELS[check.name],
                f"{check.measured:.4g}" if abs(check.measured) < 0.1 else f"{check.measured:.4f}",
                f"{'at most' if check.upper else 'at least'} {check.limit:g}",
                "MISSED" if not check.holds else "unsure" if _beyond(check) else "holds",
            )
            for check in data.checks
        ],
    )


def _ratio_row(name: str, before: float, after: float, text: Callable[[float], str]) -> Cells:
    return name, text(before), text(after), f"x {after / before:.2f}"
