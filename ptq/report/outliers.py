"""Outliers: channels whose magnitudes stand out in their tensor, and tokens that do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from calibrate.roles import SINK_INPUT
from calibrate.statistics import Statistics
from formats.checkpoint.read import Checkpoint
from formats.families.names import is_projection
from formats.families.registry import FAMILIES
from formats.scheme import Strict
from kernels.numerics import dequantize


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


def activation_outliers(statistics: Statistics, top: int = 3) -> list[OutlierRow]:
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
        rows.append(outlier_row(module, role, stats.channel_absmax, top).model_copy(update=about))
    return rows


def weight_outliers(checkpoint: Checkpoint, top: int = 3) -> list[OutlierRow]:
    """One row for every linear layer of the decoder blocks, by output channel.

    Quantized weights count with the values that they stand for.
    """
    return [outlier_row(*row, top) for row in _weights(checkpoint)]


def _weights(checkpoint: Checkpoint) -> Iterator[tuple[str, str, Tensor]]:
    for name in checkpoint.names():
        module, _, leaf = name.rpartition(".")
        if not is_projection(module) or leaf not in ("weight", "weight_packed"):
            continue
        spec = checkpoint.scheme_of(module).weights
        if spec is not None:
            stored = checkpoint.weight(module)
            values = dequantize(stored.q, stored.scale, stored.zero_point, spec.block)
        else:
            values = checkpoint.tensor(name).float()
        yield module, "weight", values.abs().amax(dim=1)


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
    return [row for row in rows if row in first.values()]
