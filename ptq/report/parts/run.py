"""The report's sections on the run itself: times, texts, events, scales, and what it ran on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptq.report.data import ReportData
from ptq.report.page.section import Section, Table
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
