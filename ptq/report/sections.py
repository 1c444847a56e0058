"""The report's text and tables, before they become HTML or Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inference.accuracy import Accuracy
from inference.bench.figures import Speed
from ptq.report.data import ReportData
from ptq.report.format import interval_text, percentiles_text, spread_text
from ptq.report.outliers import by_ratio, distinct_inputs
from ptq.report.peers import peers_section
from ptq.report.summary import Cells, Section, Table, summary_rows
from ptq.result import BlockRow
from ptq.text import decibel, percent, scale_text, size_text

MOST_OUTLIERS = 12


def sections(data: ReportData) -> Iterator[Section]:
    """Everything below the verdict, in order."""
    yield _accuracy(data.accuracy)
    yield _divergence(data.accuracy)
    if data.peers:
        yield peers_section(data)
    yield _layers(data)
    if data.quantization.smoothing or data.outliers:
        yield _activations(data)
    if data.kv_scales:
        yield _cache(data)
    yield _size_and_speed(data)
    yield _run(data)
    yield _scales(data)
    yield _made_of(data)
    yield Section(
        "Recipe",
        "Every setting of the run, defaults included, with full paths. Saved as a file, it repeats "
        "the run: `ptq run FILE --output DIR`.",
        code=data.recipe,
    )


def _accuracy(a: Accuracy) -> Section:
    return Section(
        "Perplexity",
        "Perplexity is exp of the mean negative log-likelihood per token of the evaluation text; "
        "lower is better. Both models ran on this project's engine and its real kernels, the "
        "quantized cache included. The ratio is what quantization cost: 1 is no loss. Intervals "
        "are 95% percentile bootstrap intervals over sequences; that of the ratio is paired, so "
        f"what makes the text itself hard cancels out. {a.tokens:,} predictions in "
        f"{a.sequences:,} sequences.",
        ("perplexity",),
        (
            Table(
                ("", "value", "95% interval"),
                [
                    (
                        "original perplexity",
                        f"{a.perplexity_original:.4f}",
                        interval_text(a.perplexity_original_ci),
                    ),
                    (
                        "quantized perplexity",
                        f"{a.perplexity_quantized:.4f}",
                        interval_text(a.perplexity_quantized_ci),
                    ),
                    ("ratio", f"{a.perplexity_ratio:.5f}", interval_text(a.perplexity_ratio_ci, 5)),
                ],
            ),
        ),
    )


def _divergence(a: Accuracy) -> Section:
    figures = Table(
        ("", "value"),
        [
            ("mean KL divergence", f"{a.kl_mean:.3g}"),
            ("its 95% interval", interval_text(a.kl_mean_ci, 3, "g")),
            ("median", f"{a.kl_p50:.3g}"),
            ("90th percentile", f"{a.kl_p90:.3g}"),
            ("99th percentile", f"{a.kl_p99:.3g}"),
            ("largest", f"{a.kl_max:.3g}"),
            ("top-1 agreement", percent(a.top1_agreement)),
            ("top-5 agreement", percent(a.top5_agreement)),
        ],
    )
    positions = Table(
        ("position", "predictions", "original", "quantized", "mean KL", "top-1"),
        [
            (
                f"{b.start}-{b.end - 1}",
                f"{b.tokens:,}",
                f"{b.perplexity_original:.3f}",
                f"{b.perplexity_quantized:.3f}",
                f"{b.kl_mean:.3g}",
                percent(b.top1_agreement),
            )
            for b in a.positions
        ],
        "By position in the sequence: perplexities, KL divergence and agreement",
        folded=True,
    )
    return Section(
        "Divergence and agreement",
        "The Kullback-Leibler divergence KL(original || quantized), in nats, compares the two "
        "models' whole distributions at every position; 0 is no loss. Top-1 agreement is the share "
        "of positions where both hold the same token for the most likely; top-5 agreement the "
        "share of the original's five most likely tokens that are among the quantized model's "
        "five. An error that grows along the sequence points at the cache.",
        ("divergence",),
        (figures, positions),
    )


def _layers(data: ReportData) -> Section:
    rows = [
        (
            row.module,
            f"{row.shape[0]} x {row.shape[1]}",
            decibel(row.weight_sqnr_db),
            decibel(row.output_sqnr_db),
            decibel(row.baseline_output_sqnr_db),
        )
        for row in data.quantization.modules
    ]
    if not rows:
        return Section("Layers", f"The scheme {data.scheme} leaves all linear layers as they are.")
    return Section(
        "Layers",
        "Signal-to-quantization-noise ratio in dB, 10 log10 of signal power over error power: 20 "
        "dB is an error of 10%, 40 dB of 1%; higher is better. Outputs are compared on calibration "
        "samples with the layer's weight and input quantized and all before it in float. "
        "'Plain' is round-to-nearest on the model as it came.",
        ("layers",),
        (
            Table(
                ("module", "shape", "weight", "output", "plain output"),
                rows,
                f"All {len(rows)} layers, in dB",
                folded=True,
            ),
        ),
    )


def _activations(data: ReportData) -> Section:
    worst = by_ratio(distinct_inputs(data.outliers))[:MOST_OUTLIERS]
    tables = []
    if worst:
        tables.append(
            Table(
                ("input of", "largest", "median channel", "ratio", "channels"),
                [
                    (
                        row.module,
                        f"{row.absmax:.4g}",
                        f"{row.median:.4g}",
                        "" if row.ratio is None else f"{row.ratio:.1f}",
                        ", ".join(map(str, row.channels)),
                    )
                    for row in worst
                ],
                "Inputs whose largest channel stands out most, as the model came",
            )
        )
    smoothing = data.quantization.smoothing
    if smoothing:
        tables.append(
            Table(
                ("source", "alpha", "factors", "block error", "unsmoothed"),
                [
                    (
                        row.source,
                        row.strength,
                        f"{row.scale_min:.3g} to {row.scale_max:.3g}",
                        *(
                            "–" if error is None else f"{error:.3g}"
                            for error in (row.error, row.unsmoothed_error)
                        ),
                    )
                    for row in smoothing
                ],
                f"All {len(smoothing)} smoothing groups",
                folded=True,
            )
        )
    text = (
        "One static scale must hold all channels of an input, so a channel far above the median "
        "costs all others their resolution. "
    )
    if smoothing:
        text += (
            "SmoothQuant divides such channels and multiplies the weights that read them; alpha is "
            "how much of the difficulty moves into the weights, 1 all of it. Magnitudes are those "
            "of the model as it came. Errors are the squared error of "
            "the block's output, relative to its power, with only this group quantized."
        )
    return Section("Activations and smoothing", text, ("activations",), tuple(tables))


def _cache(data: ReportData) -> Section:
    entries = [e for e in data.scale_table.entries if e.role in ("k_cache", "v_cache")]
    table = Table(
        ("attention", "cache", "scales", "absmax", "clipped", "SQNR (dB)"),
        [
            (
                entry.module,
                entry.role[0].upper(),
                scale_text(entry.scale_min, entry.scale_max),
                f"{entry.absmax:.4g}",
                percent(entry.clip_fraction, 4),
                decibel(entry.sqnr_db),
            )
            for entry in entries
        ],
        f"All {len(entries)} scale tensors of the cache",
        folded=True,
    )
    text = (
        "Static scales of the cached keys (after the rotary embedding) and values, one for each KV "
        "head, as calibrated. A head much above its neighbours has outliers of its own."
    )
    if any(entry.sqnr_db is not None for entry in entries):
        text += (
            " SQNR in the table is the signal-to-quantization-noise ratio of the noisiest of the "
            "tensor's heads."
        )
    return Section("Cache scales", text, ("cache",), (table,))


def _size_and_speed(data: ReportData) -> Section:
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
    return Section("Size and speed", text, ("sizes",), tuple(tables))


def _speed_rows(o: Speed, q: Speed) -> Iterator[Cells]:
    yield "prefill tokens/s", spread_text(o.prefill_tokens_s), spread_text(q.prefill_tokens_s)
    yield "decode tokens/s", spread_text(o.decode_tokens_s), spread_text(q.decode_tokens_s)
    for what, key in (("first token", "first_token_ms"), ("per token", "per_token_ms")):
        yield (
            f"{what}, ms (p50 / p90 / p99)",
            percentiles_text(getattr(o, key)),
            percentiles_text(getattr(q, key)),
        )


def _run(data: ReportData) -> Section:
    run = data.quantization
    phases = {name: s for name, s in run.seconds.items() if name != "total"}
    times = [(f"quantization: {name}", f"{s:.1f} s") for name, s in phases.items()]
    times += [("quantization in all", f"{run.seconds.get('total', sum(phases.values())):.1f} s")]
    times += [(name, f"{s:.1f} s") for name, s in data.seconds.items()]
    times += [("peak memory of quantization", size_text(run.peak_rss_bytes))]
    texts = Table(
        ("text", "source", "sequences", "tokens", "fingerprint"),
        [
            (t.split, t.source, f"{t.sequences:,}", f"{t.tokens:,}", t.fingerprint[:16])
            for t in (run.calibration, data.evaluation)
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


def _made_of(data: ReportData) -> Section:
    made = data.provenance
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    facts = (
        ("made", made.made),
        ("versions", versions),
        ("device", f"{made.device}, {made.threads} threads"),
        ("model", made.model),
        ("calibration text", data.quantization.calibration.source),
        ("evaluation text", data.evaluation.source),
        ("checkpoint", made.checkpoint),
    )
    return Section(
        "What ran, where and when",
        "What this report was measured with.",
        notes=tuple(f"{name}: {value}" for name, value in facts),
    )


def _block_costs(rows: Sequence[BlockRow]) -> Iterator[Table]:
    if rows:
        cells = [(r.block, f"{r.seconds:.1f}", size_text(r.memory_bytes)) for r in rows]
        title = f"Time and memory of all {len(rows)} blocks"
        yield Table(("block", "seconds", "peak memory so far"), cells, title, folded=True)


def _scales(data: ReportData) -> Section:
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
