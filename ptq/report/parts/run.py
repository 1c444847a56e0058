"""The report's sections on the run itself: sizes, speed, times, texts, scales, what it ran on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.axes import Axes

from inference.bench.figures import Speed, Spread
from ptq.report.data import ReportData
from ptq.report.page.figure import ORIGINAL, QUANTIZED, new_panel
from ptq.report.page.page import Cells, Plot, Section, Table
from ptq.report.verdict import summary_rows
from ptq.result import BlockRow, CalibrationSummary
from ptq.text import decibel, percent, scale_text, size_text


def run_section(data: ReportData) -> Section:
    """What the run took, what it read, and what was unusual."""
    run = data.quantization
    phases = {name: s for name, s in run.seconds.items() if name != "total"}
    times = [(f"quantization: {name}", f"{s:.1f} s") for name, s in phases.items()]
    times += [("quantization in all", f"{run.seconds.get('total', sum(phases.values())):.1f} s")]
    times += [(name, f"{s:.1f} s") for name, s in data.seconds.items()]
    times += [("peak memory of quantization", size_text(run.peak_rss_bytes))]
    texts = Table(
        ("split", "kind", "sequences", "tokens", "fingerprint"),
        [
            (t.split, t.kind, f"{t.sequences:,}", f"{t.tokens:,}", t.fingerprint[:16])
            for t in _texts(data)
        ],
    )
    events = tuple(f"{event.module}: {event.message} ({event.kind})" for event in run.events)
    return Section(
        "The run",
        f"{data.model.model_type}, {data.model.blocks} blocks, {data.model.parameters / 1e6:.1f} M "
        f"parameters in {data.model.dtype}. A fingerprint is the start of the SHA-256 of the "
        "tokens used: two runs on the same text have the same. "
        + (f"{len(events)} events are worth a look:" if events else "Nothing unusual happened."),
        tables=(Table(("phase", "cost"), times), texts, *_block_costs(run.blocks)),
        notes=events,
    )


def _texts(data: ReportData) -> list[CalibrationSummary]:
    """All that was read: to calibrate, and to measure."""
    also = [] if data.also is None else [data.also.text]
    return [data.quantization.calibration, data.evaluation, *also]


def _block_costs(rows: Sequence[BlockRow]) -> Iterator[Table]:
    if rows:
        cells = [(r.block, f"{r.seconds:.1f}", size_text(r.memory_bytes)) for r in rows]
        title = f"Time and memory of all {len(rows)} blocks"
        yield Table(("block", "seconds", "peak memory so far"), cells, title, folded=True)


def scales_section(data: ReportData) -> Section:
    """Every scale of the checkpoint."""
    rows = [
        (
            entry.tensor,
            entry.granularity,
            scale_text(entry.scale_min, entry.scale_max),
            entry.statistic,
            f"{entry.absmax:.4g}",
            f"{entry.tokens:,}",
            percent(entry.clip_fraction, 4),
            decibel(entry.sqnr_db),
        )
        for entry in data.scale_table.entries
    ]
    heads = ("tensor", "for", "scales", "range by", "absmax", "tokens", "clipped", "SQNR (dB)")
    return Section(
        "Scale table",
        "Every scale of the checkpoint and where it came from: the statistic that set its range, "
        "the largest magnitude seen, on how many tokens, and the share of values beyond the range. "
        "The checkpoint holds the same table in quant/scale_table.json.",
        tables=(Table(heads, rows, f"All {len(rows)} scales", folded=True),),
    )


def provenance_section(data: ReportData) -> Section:
    """When, where and with what the report was made."""
    made = data.provenance
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    facts = (
        ("made", made.made),
        ("versions", versions),
        ("device", f"{made.device}, {made.threads} threads"),
        ("model", made.model),
        *((f"{t.split} text", "; ".join((t.source, *t.notes))) for t in _texts(data)),
        ("checkpoint", made.checkpoint),
    )
    return Section(
        "What ran, where and when",
        "What this report was measured with.",
        notes=tuple(f"{name}: {value}" for name, value in facts),
    )


def recipe_section(data: ReportData) -> Section:
    """The recipe, to be copied."""
    return Section(
        "Recipe",
        "Every setting of the run, defaults included, with full paths. Saved as a file, it repeats "
        "the run: `ptq run FILE --output DIR`.",
        code=data.recipe,
    )


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
    yield "prefill tokens/s", _spread(o.prefill_tokens_s), _spread(q.prefill_tokens_s)
    yield "decode tokens/s", _spread(o.decode_tokens_s), _spread(q.decode_tokens_s)
    for what, key in (("first token", "first_token_ms"), ("per token", "per_token_ms")):
        yield f"{what}, ms (p50 / p90 / p99)", getattr(o, key).text(), getattr(q, key).text()


def _spread(spread: Spread) -> str:
    """Median with the least and the greatest."""
    return f"{spread.median:,.0f} ({spread.low:,.0f} to {spread.high:,.0f})"


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
