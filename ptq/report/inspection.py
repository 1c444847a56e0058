"""A checkpoint's scheme, sizes, scales and outlier channels: the lines of `ptq inspect`.

Outliers are channels whose magnitudes stand out in their tensor, and tokens that do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from torch import Tensor

from calibrate.spec import SINK_INPUT
from calibrate.statistics import Statistics
from formats.checkpoint.read import Checkpoint
from formats.errors import RequestError
from formats.families.block_layers import is_projection
from formats.families.registry import FAMILIES
from formats.scheme import Scheme, Strict
from ptq.methods.common.float_model import values_of
from ptq.output import STATISTICS_FILE
from ptq.text import decibel, matches, scale_text, size_text

OF_TOKENS = ("median token", "at position", "sinks")  # heads of what weights have not


class OutlierRow(Strict):
    """The largest channels of one tensor against its median channel.

    Attributes:
        module: Full name of the module.
        role: `weight` for a layer's output channels; `input`, `k_cache` or `v_cache` for what
            calibration saw.
        absmax: Largest magnitude of all channels.
        median: Median of the channels' largest magnitudes.
        ratio: absmax / median; None where the median channel is all zero.
        channels: Indices of the largest channels, descending by magnitude.
        magnitudes: Largest magnitudes of those channels, in the same order.
        token_median: Median over tokens of their largest magnitude; None where it is not known.
        peak_position: Where in its sample the token with the largest magnitude stood; -1 likewise.
        sinks: Largest magnitude at sink tokens, which the rest is without; None without any.
    """

    module: str
    role: str
    absmax: float
    median: float
    ratio: float | None
    channels: tuple[int, ...]
    magnitudes: tuple[float, ...]
    token_median: float | None = None
    peak_position: int = -1
    sinks: float | None = None

    @property
    def texts(self) -> dict[str, str]:
        """Its figures for a person, by the heads of a table."""
        return {
            "largest": f"{self.absmax:.4g}",
            "median channel": f"{self.median:.4g}",
            "ratio": "" if self.ratio is None else f"{self.ratio:.1f}",
            "channels": ", ".join(map(str, self.channels)),
            "median token": "" if self.token_median is None else f"{self.token_median:.4g}",
            "at position": "" if self.peak_position < 0 else str(self.peak_position),
            "sinks": "" if self.sinks is None else f"{self.sinks:.4g}",
        }


def outlier_row(module: str, role: str, channel_absmax: Tensor, top: int = 3) -> OutlierRow:
    """Summarize the largest magnitudes of all channels [channels]."""
    flat = channel_absmax.flatten().double()
    largest = flat.topk(min(top, len(flat)))
    median = flat.median().item()
    return OutlierRow(
        module=module,
        role=role,
        absmax=flat.max().item(),
        median=median,
        ratio=flat.max().item() / median if median > 0 else None,
        channels=tuple(largest.indices.tolist()),
        magnitudes=tuple(largest.values.tolist()),
    )


def activation_outliers(statistics: Statistics) -> list[OutlierRow]:
    """One row for every input and cache that calibration observed, of the original model."""
    seen, rows = statistics.at(), list[OutlierRow]()
    for (module, role), stats in seen.items():
        if role == SINK_INPUT:
            continue
        sinks = seen.get((module, SINK_INPUT)) if role == "input" else None
        about = {
            "token_median": stats.token_median,
            "peak_position": stats.peak_position,
            "sinks": None if sinks is None else sinks.absmax,
        }
        rows.append(outlier_row(module, role, stats.channel_absmax).model_copy(update=about))
    return rows


def weight_outliers(checkpoint: Checkpoint) -> list[OutlierRow]:
    """One row for every linear layer of the decoder blocks, by output channel.

    Quantized weights count with the values that they stand for.
    """
    rows = []
    for name in checkpoint.names():
        module, _, leaf = name.rpartition(".")
        if not is_projection(module) or leaf not in ("weight", "weight_packed"):
            continue
        floats = checkpoint.scheme_of(module).weights is None
        values = checkpoint.tensor(name).float() if floats else values_of(checkpoint, module)
        rows.append(outlier_row(module, "weight", values.abs().amax(dim=1)))
    return rows


def by_ratio(rows: list[OutlierRow]) -> list[OutlierRow]:
    """Rows by how far their largest channel stands out, the farthest first."""
    return sorted(rows, key=lambda row: -(row.ratio or 0.0))


FIRST = {  # of the layers that read an input
    name
    for family in FAMILIES
    for name in (
        *(name for name, role in family.attention.roles.items() if role in ("q", "q_a", "o")),
        *(family.feed_forward.gate, family.feed_forward.down),
    )
}


def distinct_inputs(rows: Sequence[OutlierRow]) -> list[OutlierRow]:
    """Rows of inputs; of layers that read the same one (q, k, v and gate, up), the first by rank.

    Their statistics are equal, as one observation serves all of them.
    """
    inputs = [row for row in rows if row.role == "input"]
    inputs.sort(key=lambda row: row.module.rpartition(".")[2] not in FIRST)  # stable
    first: dict[tuple[object, ...], OutlierRow] = {}
    for row in inputs:
        block = row.module.rpartition(".")[0]
        first.setdefault((block, row.absmax, row.median, row.channels), row)
    kept = set(map(id, first.values()))
    return [row for row in rows if id(row) in kept]


class SizeRow(Strict):
    """Tensors of one kind in a checkpoint."""

    kind: str
    tensors: int
    elements: int
    nbytes: int


class Inspection(Strict):
    """What a checkpoint holds; see the module's docstring.

    Attributes:
        model_type: Such as `llama`.
        wac: The scheme's short name.
        only_here: Why no other software opens it, and what changes that; None where others do.
        layers: What is quantized otherwise: how, and full names of the layers.
        scales: One row for each scale tensor, as in the scale table; only tensor, shape and range
            where the checkpoint, of other software, has no such table.
        outliers: Outlier channels, those that stand out most first.
        sink_tokens: Tokens at the beginning of a sequence that are quantized apart.
        predicting: Full names of the layers that predict further tokens.
    """

    model_type: str
    scheme: Scheme
    wac: str
    only_here: str | None
    layers: dict[str, tuple[str, ...]]
    sizes: tuple[SizeRow, ...]
    scales: tuple[dict[str, Any], ...]
    outliers: tuple[OutlierRow, ...]
    sink_tokens: int = 0
    predicting: tuple[str, ...] = ()


def inspect(checkpoint: Checkpoint, pattern: str | None = None) -> Inspection:
    """Look into a checkpoint.

    Args:
        pattern: Only modules whose name contains it, or matches it where it has `*` or `?`.

    Raises:
        RequestError: no module matches the pattern.
        CheckpointError: the statistics beside the checkpoint are damaged.
    """
    outliers = weight_outliers(checkpoint)
    statistics = checkpoint.path.resolve().parent / STATISTICS_FILE
    if statistics.is_file():
        outliers += activation_outliers(Statistics.load(statistics))
    scales = _scales(checkpoint)
    modules = {row["module"] for row in scales} | {row.module for row in outliers}
    kept = {name for name in modules if pattern is None or matches(name, pattern)}
    if pattern is not None and not kept:
        raise RequestError(
            f"--module {pattern!r} matches none of {len(modules)} modules, such as "
            f"{min(modules, default='none')}. Give a part of a name, or a pattern with * and ?"
        )
    return Inspection(
        model_type=str(checkpoint.config.get("model_type", "unknown")),
        scheme=checkpoint.scheme,
        wac=checkpoint.scheme.wac,
        only_here=checkpoint.only_here,
        layers=_other_layers(checkpoint),
        sizes=_sizes(checkpoint),
        sink_tokens=checkpoint.sinks.tokens,
        predicting=checkpoint.predicting_layers,
        scales=tuple(row for row in scales if row["module"] in kept),
        outliers=tuple(by_ratio([row for row in outliers if row.module in kept])),
    )


def _other_layers(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    layers: dict[str, tuple[str, ...]] = {}
    for name, scheme in checkpoint.own_schemes.items():
        layers[scheme.text] = (*layers.get(scheme.text, ()), name)
    return layers


def _scales(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Rows of the scale table, or what the tensors alone tell."""
    if checkpoint.scale_table is not None:
        return [entry.model_dump(mode="json") for entry in checkpoint.scale_table.entries]
    rows: list[dict[str, Any]] = []
    for name in checkpoint.names():
        if name.endswith("_scale"):
            module, _, role = name.removesuffix("_scale").rpartition(".")
            rows.append(_scale_of(module, role, name, checkpoint.scale(name)))
    for attention, pair in checkpoint.kv_scales.items():
        for kind, scale in zip("kv", pair, strict=True):
            rows.append(_scale_of(attention, f"{kind}_cache", f"{attention}.{kind}_scale", scale))
    return rows


def _scale_of(module: str, role: str, tensor: str, scale: Tensor) -> dict[str, Any]:
    ends = {"scale_min": scale.min().item(), "scale_max": scale.max().item()}
    return {"module": module, "role": role, "tensor": tensor, "shape": list(scale.shape)} | ends


def _sizes(checkpoint: Checkpoint) -> tuple[SizeRow, ...]:
    counts: dict[str, tuple[int, int, int]] = {}

    def add(kind: str, elements: int, itemsize: float) -> None:
        tensors, before, nbytes = counts.get(kind, (0, 0, 0))
        counts[kind] = (tensors + 1, before + elements, nbytes + round(elements * itemsize))

    for name in checkpoint.names():
        dtype, (module, _, leaf) = checkpoint.dtype(name), name.rpartition(".")
        kind = f"{str(dtype).removeprefix('torch.')} weights"
        elements = math.prod(checkpoint.shape(name))
        itemsize = float(dtype.itemsize)
        if leaf == "weight_packed" and (spec := checkpoint.scheme_of(module).weights):
            kind = f"{spec.dtype} weights, packed"
            packed, elements = elements, math.prod(checkpoint.weight_shape(module))
            itemsize *= packed / elements
        elif leaf in ("weight_shape", "weight_zero_point"):
            kind = "shapes and zero points of packed weights"
        elif name.endswith("_scale"):
            kind = "scales of weights and inputs"
        add(kind, elements, itemsize)
    for pair in checkpoint.kv_scales.values():
        for scale in pair:
            add("scales of the cache", scale.numel(), scale.dtype.itemsize)
    return tuple(
        SizeRow(kind=kind, tensors=row[0], elements=row[1], nbytes=row[2])
        for kind, row in sorted(counts.items(), key=lambda item: -item[1][2])
    )


def describe(found: Inspection, top: int) -> list[str]:
    """Lines for a terminal.

    Args:
        top: Outlier channels to list, of weights and of activations each.
    """
    nbytes = sum(row.nbytes for row in found.sizes)
    lines = [f"{found.model_type}, scheme {found.wac}, {size_text(nbytes)} of tensors"]
    if found.sink_tokens:
        lines.append(
            f"  sink tokens, the first {found.sink_tokens} of a sequence, are quantized apart "
            "here; other runtimes scale them as all others"
        )
    if found.scheme.states is not None:
        lines.append(f"  recurrent states: {found.scheme.states.text}; running ones in float")
    if found.predicting:
        lines.append(f"  layers that predict further tokens: {', '.join(found.predicting)}")
    lines += [found.only_here] if found.only_here else []
    for text, names in found.layers.items():
        lines.append(f"  otherwise {len(names)} layers, such as {names[0]}: {text}")
    lines.append("")
    sizes = [
        {"kind": r.kind, "tensors": r.tensors, "elements": r.elements, "size": size_text(r.nbytes)}
        for r in found.sizes
    ]
    lines += [_text(sizes), ""]
    if found.scales:
        lines += [f"Scales ({len(found.scales)})", _text([_scale_row(r) for r in found.scales]), ""]
        lines += _cache_summary(found)
    weights = [row for row in found.outliers if row.role == "weight"]
    caches = [row for row in found.outliers if row.role in ("k_cache", "v_cache")]
    activations = by_ratio([*distinct_inputs(found.outliers), *caches])
    for title, rows in (("weights", weights), ("activations", activations)):
        if rows:
            lines += [
                f"Outlier channels of {title}: the {min(top, len(rows))} tensors whose largest "
                "channel stands out most",
                _text([_outlier_row(row) for row in rows[:top]]),
                "",
            ]
    return lines[:-1]


def _outlier_row(row: OutlierRow) -> dict[str, str]:
    heads = [head for head in row.texts if row.role != "weight" or head not in OF_TOKENS]
    return {"module": row.module, "of": row.role} | {head: row.texts[head] for head in heads}


def _scale_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the scale table without what is the same or implied in all rows."""
    low, high = row["scale_min"], row["scale_max"]
    shown: dict[str, Any] = {
        "module": row["module"],
        "role": row["role"],
        "scales": math.prod(row["shape"]),
        "range": scale_text(low, high),
    }
    if "statistic" in row:
        shown |= {
            "by": row["statistic"],
            "absmax": f"{row['absmax']:.4g}",
            "tokens": row["tokens"],
            "clipped": f"{row['clip_fraction']:.2g}",
            "SQNR (dB)": decibel(row["sqnr_db"]),
        }
    return shown


def _cache_summary(found: Inspection) -> list[str]:
    """One line each for the scales of K and of V over all layers."""
    lines = []
    for role in ("k_cache", "v_cache"):
        rows = [row for row in found.scales if row["role"] == role]
        if rows:
            low = min(row["scale_min"] for row in rows)
            high = max(row["scale_max"] for row in rows)
            lines.append(
                f"{role[0].upper()} cache: scales from {low:.3g} to {high:.3g} in {len(rows)} "
                f"layers, largest over smallest {high / low:.1f}"
            )
    return [*lines, ""] if lines else []


def _text(rows: Sequence[dict[str, Any]]) -> str:
    return pd.DataFrame(rows).to_string(index=False)


def to_csv(found: Inspection) -> str:
    """The table of scales as CSV."""
    return pd.DataFrame(list(found.scales)).to_csv(index=False)
