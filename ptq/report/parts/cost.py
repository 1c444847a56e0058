"""The report's section on what quantization saves: bytes and time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from matplotlib.axes import Axes

from inference.bench.figures import Speed
from ptq.report.data import ReportData
from ptq.report.page.figure import ORIGINAL, QUANTIZED, new_panel
from ptq.report.page.html import percentiles_text, spread_text
from ptq.report.page.section import Cells, Plot, Section, Table
from ptq.report.summary import summary_rows


def size_and_speed_section(data: ReportData) -> Section:
    """Bytes of both models, and their speeds where they were measured."""
    s = data.sizes
    text = (
        f"Weights are the bytes of the weight files. The cache is counted in the original's own "
        f"type and as the scheme stores it; while measuring, this engine held "
        f"{s.original_kv_here:,} and {s.quantized_kv_here:,} bytes per token."
    )
    rows = summary_rows(data)[1:3]
    tables = [Table(("", "original", "quantized", "change"), rows)]
    if data.speed is not None:
        o, q = data.speed.original, data.speed.quantized
        machine = data.environment
        text += (
            f" Speed: {o.batch} requests at once of {o.prompt_tokens} prompt and {o.new_tokens} "
            f"new tokens, the two models in turns, median of {o.repeats} runs with the least and "
            f"the greatest, on {machine.get('gpu', machine['processor'])}, {machine['threads']} "
            f"threads, torch {machine['torch']}. Prefill counts prompt tokens until every request "
            "has its first token; decode counts tokens from then on."
        )
        tables.append(Table(("", "original", "quantized"), list(_speed_rows(o, q))))
    plot = Plot("sizes", "Bars of sizes and speeds of both models", partial(_draw, data))
    return Section("Size and speed", text, (plot,), tuple(tables))


def _speed_rows(o: Speed, q: Speed) -> Iterator[Cells]:
    yield "prefill tokens/s", spread_text(o.prefill_tokens_s), spread_text(q.prefill_tokens_s)
    yield "decode tokens/s", spread_text(o.decode_tokens_s), spread_text(q.decode_tokens_s)
    for what, key in (("first token", "first_token_ms"), ("per token", "per_token_ms")):
        yield (
            f"{what}, ms (p50 / p90 / p99)",
            percentiles_text(getattr(o, key)),
            percentiles_text(getattr(q, key)),
        )


def _draw(data: ReportData) -> list[Axes]:
    """Bars of both models' sizes and speeds, from zero."""
    s = data.sizes
    shown = [
        ("Weights (MB)", s.original_weights / 1e6, s.quantized_weights / 1e6),
        ("Cache per token (kB)", s.original_kv / 1e3, s.quantized_kv / 1e3),
    ]
    if data.speed is not None:
        o, q = data.speed.original, data.speed.quantized
        shown += [
            ("Prefill tokens/s", o.prefill_tokens_s.median, q.prefill_tokens_s.median),
            ("Decode tokens/s", o.decode_tokens_s.median, q.decode_tokens_s.median),
        ]
    panels = [new_panel(2.4, 4) for _ in shown]
    for part, (title, *values) in zip(panels, shown, strict=True):
        bars = part.bar(["original", "quantized"], values, color=[ORIGINAL, QUANTIZED], width=0.6)
        part.bar_label(bars, [f"{v:,.3g}" if v < 1000 else f"{v:,.0f}" for v in values], padding=2)
        part.set_title(title)
        part.margins(y=0.18)
        part.grid(visible=False)
        part.set_yticks([])
        part.spines["left"].set_visible(False)
    return panels
