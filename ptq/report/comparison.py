"""The reports of several runs side by side, as one table and one plot.

What differs between two recipes, or between two checkpoints, line by line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd
from pydantic import ValidationError

from formats.errors import RequestError
from formats.namespace import later
from ptq.output import PEERS_FILE
from ptq.peers.measure import PeerRow, PeersRecord
from ptq.recipe.reading import load_recipe
from ptq.report.data import ReportData
from ptq.report.parts.peers import method_names

if TYPE_CHECKING:
    import torch

    from formats.checkpoint.read import Checkpoint
else:
    torch = later("torch")


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


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Leaves of nested mappings and lists by their dotted key."""
    items: Iterator[tuple[Any, Any]]
    if isinstance(value, dict) and value:
        items = iter(value.items())
    elif isinstance(value, list | tuple) and value:
        items = iter(enumerate(value))
    else:
        return {key: value}
    leaves: dict[str, Any] = {}
    for part, inner in items:
        leaves |= flatten(inner, f"{key}.{part}" if key else str(part))
    return leaves


def diff_values(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """A line for each key whose value differs, or that only one has."""
    for key in [*a, *(key for key in b if key not in a)]:
        left, right = (repr(side[key]) if key in side else "absent" for side in (a, b))
        if left != right:
            yield f"{key}: {left} -> {right}"


def diff_recipes(a: Path, b: Path) -> list[str]:
    """Settings that differ between two recipes."""
    return list(diff_values(*(flatten(load_recipe(p).model_dump(mode="json")) for p in (a, b))))


def diff_checkpoints(a: Checkpoint, b: Checkpoint, top: int = 10) -> list[str]:
    """What differs between two checkpoints: scheme, tensors, scales.

    Args:
        a: The first.
        b: The second.
        top: Tensors that are listed of each kind of difference, the largest first.
    """
    schemes = [flatten(side.scheme.model_dump(mode="json"), "scheme") for side in (a, b)]
    lines = list(diff_values(*schemes))
    apart = sorted(set(a.own_schemes) | set(b.own_schemes))
    lines += diff_values(
        *({f"scheme of {n}": side.scheme_of(n).text for n in apart} for side in (a, b))
    )
    first, second = set(a.names()), set(b.names())
    lines += _listed("only in the first", sorted(first - second), top)
    lines += _listed("only in the second", sorted(second - first), top)
    changed, scales = [], []
    for name in sorted(first & second):
        if (a.dtype(name), a.shape(name)) != (b.dtype(name), b.shape(name)):
            changed.append((2.0, f"{name}: {_kind(a, name)} -> {_kind(b, name)}"))
            continue
        left, right = a.tensor(name), b.tensor(name)
        share = (left.view(torch.uint8) != right.view(torch.uint8)).float().mean().item()
        if share and name.endswith("_scale"):
            scales.append(_ratio(name, left.float(), right.float()))
        elif share:
            same = (left.float() == right.float()).float().mean().item()
            changed.append((1 - same, f"{name}: {1 - same:.2%} of its values differ"))
    for attention in sorted(set(a.kv_scales) & set(b.kv_scales)):
        for role, x, y in zip("kv", a.kv_scales[attention], b.kv_scales[attention], strict=True):
            if x.shape != y.shape or not torch.equal(x, y):
                name = f"{attention}.{role}_scale"
                scales.append(
                    _ratio(name, x, y) if x.shape == y.shape else (9.0, f"{name}: other shape")
                )
    lines += _listed("tensors that differ", _by_size(changed), top)
    lines += _listed("scales that differ", _by_size(scales), top)
    return lines


def _ratio(name: str, a: torch.Tensor, b: torch.Tensor) -> tuple[float, str]:
    ratio = b / a
    low, high = ratio.min().item(), ratio.max().item()
    return max(high, 1 / low) - 1, f"{name}: x {low:.4g} to {high:.4g}"


def _by_size(rows: list[tuple[float, str]]) -> list[str]:
    return [text for _, text in sorted(rows, key=lambda row: -row[0])]


def _listed(title: str, rows: list[str], top: int) -> list[str]:
    if not rows:
        return []
    more = [f"  and {len(rows) - top} more"] if len(rows) > top else []
    return [f"{title} ({len(rows)})", *(f"  {row}" for row in rows[:top]), *more]


def _kind(checkpoint: Checkpoint, name: str) -> str:
    dtype = str(checkpoint.dtype(name)).removeprefix("torch.")
    return f"{dtype} {list(checkpoint.shape(name))}"
