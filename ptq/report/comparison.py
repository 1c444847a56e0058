"""The reports of several runs side by side, as one table and one plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from pydantic import ValidationError

from formats.errors import RequestError
from ptq.output import PEERS_FILE
from ptq.peers.measure import PeerRow, PeersRecord
from ptq.report.data import ReportData
from ptq.report.parts.peers import method_names

R = TypeVar("R", ReportData, PeersRecord)
REPORT = "report/report.json"
CELLS = {  # of what may not have been measured
    "weights": "x {:.2f}",
    "cache": "x {:.2f}",
    "prefill": "x {:.2f}",
    "decode": "x {:.2f}",
    "top1": "{:.1%}",
    "seconds": "{:.0f} s",
}


def load_reports(outputs: Sequence[Path]) -> dict[str, ReportData | PeersRecord]:
    """Reports, or records of peers alone, by the name of their output directory.

    Raises:
        RequestError: one is missing or damaged, two have one name, or they do not compare with the
            same original on the same tokens.
    """
    reports: dict[str, ReportData | PeersRecord] = {}
    for output in outputs:
        name = output.resolve().name
        if {name, f"{name}/{PEERS_FILE}"} & set(reports):
            raise RequestError(f"two of the outputs are named {name!r}; rename one")
        alone = (output / PEERS_FILE).exists()
        if alone:
            reports[f"{name}/{PEERS_FILE}"] = _load(output / PEERS_FILE, PeersRecord)
        if not alone or (output / REPORT).exists():
            reports[name] = _load(output / REPORT, ReportData)
    first, *others = reports.items()
    for name, report in others:
        for what, found, wanted in (
            ("model", report.model, first[1].model),
            ("tokens", report.evaluation.fingerprint, first[1].evaluation.fingerprint),
        ):
            if found != wanted:
                raise RequestError(
                    f"{name} and {first[0]} were not measured on the same {what}; compare runs of "
                    "one model and one evaluation split"
                )
    return reports


def _load(path: Path, model: type[R]) -> R:
    try:
        return model.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise RequestError(
            f"{path}: not a readable report ({reason}). Give output directories of finished runs; "
            "`ptq report OUTPUT` writes the report again"
        ) from error


def table(reports: dict[str, ReportData | PeersRecord]) -> pd.DataFrame:
    """One row for each run and each peer that ran, the least KL divergence first.

    A row holds figures against the original, and what the run took; sizes and speeds of peers are
    not measured. Of a peer that several of the runs measured, the first one counts.
    """
    runs = [row_of(name, r) for name, r in reports.items() if isinstance(r, ReportData)]
    measured = [row for report in reports.values() for row in report.peers if row.accuracy]
    peers = {(row.name, row.version): row for row in reversed(measured)}
    frame = pd.DataFrame([*runs, *map(_peer_row, peers.values())])
    if frame.empty:
        raise RequestError("none of the outputs holds a figure: every peer failed, see its log")
    return frame.sort_values("kl", kind="stable", ignore_index=True)


def _peer_row(peer: PeerRow) -> dict[str, Any]:
    accuracy = peer.accuracy
    assert accuracy is not None
    unmeasured = ("weights", "cache", "prefill", "decode")
    return {
        "run": peer.name,
        "scheme": f"{peer.package} {peer.version}",
        "methods": peer.method,
        "perplexity": accuracy.perplexity_ratio,
        "kl": accuracy.kl_mean,
        "top1": accuracy.top1_agreement,
        "seconds": peer.seconds,
    } | dict.fromkeys(unmeasured, math.nan)


def row_of(name: str, report: ReportData) -> dict[str, Any]:
    """A run's row of the table."""
    accuracy, sizes, speed = report.accuracy, report.sizes, report.speed
    row: dict[str, Any] = {
        "run": name,
        "scheme": report.scheme,
        "methods": method_names(report.recipe),
        "weights": sizes.quantized_weights / sizes.original_weights,
        "cache": sizes.quantized_kv / sizes.original_kv,
        "perplexity": accuracy.perplexity_ratio,
        "kl": accuracy.kl_mean,
        "top1": accuracy.top1_agreement,
        "seconds": report.quantization.seconds["total"],
    }
    for phase in ("prefill", "decode"):
        name = f"{phase}_tokens_s"
        row[phase] = speed and (
            getattr(speed.quantized, name).median / getattr(speed.original, name).median
        )
    return row


def markdown(frame: pd.DataFrame) -> str:
    """The table as Markdown, with a column of models if it has one; sizes and speeds as factors."""
    head = (
        "| recipe | scheme | methods | weights | cache | perplexity | KL, nats | top-1 agreement "
        "| prefill | decode | quantized in |"
    )
    several = "model" in frame
    lines = [f"| model {head}" if several else head, "|---" * (11 + several) + "|"]
    for row in frame.to_dict("records"):
        weights, cache, *speeds, top1, seconds = (
            "" if pd.isna(row[key]) else form.format(row[key]) for key, form in CELLS.items()
        )
        cells = (
            *([row["model"]] if several else []),
            f"`{row['run']}`",
            row["scheme"],
            row["methods"],
            weights,
            cache,
            f"x {row['perplexity']:.4f}",
            f"{row['kl']:.4f}",
            top1,
            *speeds,
            seconds,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
