"""The report's section on the cache's static scales."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from ptq.report.data import ReportData
from ptq.report.page.figure import new_panel
from ptq.report.page.section import Plot, Section, Table
from ptq.report.parts.by_block import heat_map
from ptq.text import decibel, percent, scale_text


def cache_section(data: ReportData) -> Section:
    """Scales of K and V, layer by layer and head by head."""
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
        "head, as calibrated. A head much above its neighbours has outliers of its own. Of latent "
        "attention K is the rotated part of the keys and V the latent, one of each for all heads; "
        "of channels with scales of their own the largest is drawn."
    )
    if any(entry.sqnr_db is not None for entry in entries):
        text += (
            " SQNR in the table is the signal-to-quantization-noise ratio of the noisiest of the "
            "tensor's heads."
        )
    shown = "Heat maps of the cache's scales by layer and head"
    return Section("Cache scales", text, (Plot("cache", shown, partial(_draw, data)),), (table,))


def _draw(data: ReportData) -> list[Axes]:
    heads = [str(h) for h in range(len(data.kv_scales[0].k))]
    panels = []
    layers = [re.sub(r"\D+", "", row.module) for row in data.kv_scales]
    for title, rows in (
        ("K scales", [row.k for row in data.kv_scales]),
        ("V scales", [row.v for row in data.kv_scales]),
    ):
        grid, axes = np.array(rows).T, new_panel(1.1 + 0.34 * len(heads), 2)
        heat_map(axes, grid, layers, heads, (grid.min(), grid.max()), "{:.2g}")
        axes.set_title(title)
        axes.set_xlabel("layer")
        axes.set_ylabel("KV head")
        panels.append(axes)
    return panels
