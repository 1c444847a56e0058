"""The report's sections on the run: budget, sizes, speed, times, texts, scales, machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.axes import Axes

from inference.bench.figures import Speed, Spread
from ptq.report.data import ReportData
from ptq.report.page import LIMIT, ORIGINAL, QUANTIZED, Cells, Plot, Section, Table, new_panel
from ptq.report.verdict import summary_rows
from ptq.result import BlockRow, CalibrationSummary
from ptq.search.choice import BudgetRecord, Trial, choice_rows, cost_of
from ptq.search.costs import Cost, GroupCosts
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
            (t.split, t.kind_name, f"{t.sequences:,}", f"{t.tokens:,}", t.fingerprint[:16])
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
    if data.states is not None:
        text += (
            f" The recurrent state of a sequence has {data.states.float_bytes:,} bytes as it runs "
            f"and {data.states.int8_bytes:,} as the prefix cache keeps it. Accuracy is that of "
            "text in which each block of 64 tokens begins with a kept state, the most that a "
            "request can lose by them."
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
        if loaded := data.speed.loaded:
            text += (
                f" The machine had other work meanwhile ({loaded}): an idle one is faster, and the "
                "ratio of the two may differ. `ptq report` measures again."
            )
        tables.append(Table(("", "original", "quantized"), list(_speed_rows(o, q))))
    plot = Plot("sizes", "Bars of sizes and speeds of both models", partial(_draw_sizes, data))
    return Section("Size and speed", text, (plot,), tuple(tables))


def _speed_rows(o: Speed, q: Speed) -> Iterator[Cells]:
    yield "prefill tokens/s", _spread(o.prefill_tokens_s), _spread(q.prefill_tokens_s)
    yield "decode tokens/s", _spread(o.decode_tokens_s), _spread(q.decode_tokens_s)
    for what, key in (("first token", "first_token_ms"), ("per token", "per_token_ms")):
        yield f"{what}, ms (p50 / p90 / p99)", getattr(o, key).text(), getattr(q, key).text()


def _spread(spread: Spread) -> str:
    """Median with the least and the greatest."""
    return f"{spread.median:,.0f} ({spread.low:,.0f} to {spread.high:,.0f})"


def _draw_sizes(data: ReportData) -> list[Axes]:
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


FOLDED = 40  # groups from which on their table is folded


def budget_section(record: BudgetRecord) -> Section:
    """What was asked, what was chosen from, and the outcome."""
    head, *rows = choice_rows(record)
    shown = "Bytes of the weight files against KL divergence: the frontier, uniform recipes, trials"
    groups = [_group_row(record, group, name) for group, name in _chosen(record)]
    return Section(
        f"The budget: {record.budget.text}",
        f"Layers that are multiplied as one share a scheme, of those that the target "
        f"{record.budget.target} runs fast. Each candidate was rounded by "
        f"{record.costs.rounding} and its cost taken from the model's Fisher information: what "
        "rounding weights and inputs costs in nats of KL divergence, to second order, on the "
        "calibration text. Costs add up, and dynamic programming finds the fewest bytes for every "
        "loss. What is measured on the evaluation text exceeds predictions by a factor that hardly "
        "depends on the choice (errors of several layers go together, and the text is another): "
        f"here {record.factor:.3f}, where {record.expected_factor:.3f} was expected. What is said "
        "to be predicted of a choice is what was expected before it was measured; the frontier and "
        "the groups' figures are multiplied with the factor that was found.",
        (Plot("frontier", shown, partial(_draw_budget, record)),),
        (
            Table(head, rows, "What was chosen"),
            Table(TRIAL_HEADS, list(_trial_rows(record)), "Choices that were measured"),
            Table(
                GROUP_HEADS, groups, "Each group, and one step to its sides", len(groups) > FOLDED
            ),
        ),
    )


TRIAL_HEADS = (
    "trial",
    "bytes",
    "uncorrected",
    "predicted KL",
    "measured KL",
    "perplexity",
    "budget",
)
GROUP_HEADS = ("group", "chosen", "bits", "KL", "one step smaller", "one step larger")


def _chosen(record: BudgetRecord) -> Iterator[tuple[GroupCosts, str]]:
    return zip(record.costs.groups, record.trial.schemes, strict=True)


def _trial_rows(record: BudgetRecord) -> Iterator[Cells]:
    for i, trial in enumerate(record.trials):
        yield (
            f"{i + 1}{', chosen' if i == record.chosen and len(record.trials) > 1 else ''}",
            size_text(trial.nbytes),
            f"{trial.predicted:.5f}",
            f"{trial.foretold:.5f}",
            f"{trial.kl:.5f}",
            f"x {trial.perplexity_ratio:.4f}",
            _kept(trial),
        )


def _kept(trial: Trial) -> str:
    if trial.limit is None:
        return ""
    return "holds" if trial.holds else "MISSED"


def _group_row(record: BudgetRecord, group: GroupCosts, name: str) -> Cells:
    """A group, its choice, and what the next candidates would change."""
    here = cost_of(group, name)
    by_size = sorted(group.candidates, key=lambda cost: cost.nbytes)
    at = by_size.index(here)
    return (
        group.label,
        name,
        f"{8 * here.nbytes / group.elements:.2f}",
        f"{record.factor * here.kl:.6f}",
        _step(record, here, by_size[at - 1]) if at > 0 else "",
        _step(record, here, by_size[at + 1]) if at + 1 < len(by_size) else "",
    )


def _step(record: BudgetRecord, here: Cost, other: Cost) -> str:
    """What another candidate would change, and the price of a byte."""
    kl, nbytes = record.factor * (other.kl - here.kl), other.nbytes - here.nbytes
    return f"{other.scheme}: {kl:+.6f} nats, {nbytes / 1e3:+,.1f} kB, {-1e9 * kl / nbytes:.1f} n/B"


def _draw_budget(record: BudgetRecord) -> list[Axes]:
    """KL divergence against bytes: the frontier, one scheme for all, and what was measured."""
    axes, factor, curve = new_panel(4.2), record.factor, record.curve
    along, down = [x / 1e6 for x in curve.nbytes], [factor * y for y in curve.kl]
    label = "least predicted loss, corrected"
    axes.step(along, down, where="post", color=QUANTIZED, alpha=0.5, linewidth=2, label=label)
    for scheme in record.costs.schemes:
        if (whole := record.costs.uniform(scheme)) is not None:
            x, y = whole[0] / 1e6, factor * whole[1]
            axes.plot(x, y, "s", color=ORIGINAL, markerfacecolor="white")
            axes.annotate(scheme, (x, y), (6, 4), textcoords="offset points", fontsize=8)
    label = "one scheme for all, as predicted"
    axes.plot([], [], "s", color=ORIGINAL, markerfacecolor="white", label=label)
    for i, trial in enumerate(record.trials):
        if i != record.chosen:
            axes.plot(trial.nbytes / 1e6, trial.kl, "o", color=LIMIT, markersize=5)
    size, kl = record.trial.nbytes / 1e6, record.trial.kl
    axes.plot(size, kl, "*", color=LIMIT, markersize=12, label="chosen, as measured")
    _limit(axes, record)
    axes.set_yscale("log")
    axes.set_xlabel("weight files (MB)")
    axes.set_ylabel("KL divergence (nats)")
    axes.set_title("The least that every size loses")
    axes.legend(fontsize=8, loc="upper right")
    return [axes]


def _limit(axes: Axes, record: BudgetRecord) -> None:
    name, value = record.budget.limit
    if name == "kl":
        axes.axhline(value, color=LIMIT, linewidth=1, linestyle="--")
    if name == "bytes":
        axes.axvline(value / 1e6, color=LIMIT, linewidth=1, linestyle="--")
