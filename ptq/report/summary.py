"""The tables that sum a run up: original against quantized, and the thresholds."""

from __future__ import annotations

from collections.abc import Callable

from ptq.report.data import LABELS, ReportData
from ptq.report.page.section import Cells, Table
from ptq.text import percent, size_text


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
        *_also_rows(data),
        ("top-1 agreement", "", percent(a.top1_agreement), ""),
        ("top-5 agreement", "", percent(a.top5_agreement), ""),
    ]
    if data.drafts is not None:
        o, q = data.drafts.original, data.drafts.quantized
        rows.append(_ratio_row("tokens a step, mtp drafts", o, q, lambda x: f"{x:.2f}"))
    if data.speed is not None:
        o, q = data.speed.original, data.speed.quantized
        for phase, key in (("prefill", "prefill_tokens_s"), ("decode", "decode_tokens_s")):
            before, after = getattr(o, key).median, getattr(q, key).median
            rows.append(_ratio_row(f"{phase} tokens/s", before, after, lambda x: f"{x:.0f}"))
    return rows


def _also_rows(data: ReportData) -> list[Cells]:
    """The same of text of another kind, if there is one."""
    if data.also is None:
        return []
    return [(f"mean KL, {data.also.text.kind}", "", f"{data.also.accuracy.kl_mean:.2g}", "")]


def check_rows(data: ReportData) -> Table:
    """Limits beside what was measured."""
    return Table(
        ("limit" if data.known else "threshold", "measured", "allowed", "verdict"),
        [
            (
                LABELS[check.name],
                f"{check.measured:.4g}" if abs(check.measured) < 0.1 else f"{check.measured:.4f}",
                f"{'at most' if check.upper else 'at least'} {check.limit:g}",
                "holds" if check.holds else "MISSED",
            )
            for check in data.checks
        ],
    )


def _ratio_row(name: str, before: float, after: float, text: Callable[[float], str]) -> Cells:
    return name, text(before), text(after), f"x {after / before:.2f}"
