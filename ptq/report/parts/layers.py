"""The report's section on single layers: how much noise quantization puts on each one's output."""

from __future__ import annotations

from functools import partial

import numpy as np
from matplotlib.axes import Axes

from ptq.report.data import ReportData
from ptq.report.page.figure import new_panel
from ptq.report.page.section import Plot, Section, Table
from ptq.report.parts.by_block import grid_of, heat_map, number, one_of_experts
from ptq.text import decibel


def layers_section(data: ReportData) -> Section:
    """Signal-to-noise ratios of every quantized layer."""
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
    heads = ("module", "shape", "weight", "output", "plain output")
    return Section(
        "Layers",
        "Signal-to-quantization-noise ratio in dB, 10 log10 of signal power over error power: 20 "
        "dB is an error of 10%, 40 dB of 1%; higher is better. Outputs are compared on calibration "
        "samples with the layer's weight and input quantized and all before it in float. "
        "'Plain' is round-to-nearest on the model as it came.",
        (Plot("layers", "Heat maps of the output SQNR of every layer", partial(_draw, data)),),
        (Table(heads, rows, f"All {len(rows)} layers, in dB", folded=True),),
    )


def _draw(data: ReportData) -> list[Axes]:
    """Heat maps of output SQNR, of a block's experts the worst: as stored, and plainly rounded."""
    rows = one_of_experts(
        {row.module: row for row in data.quantization.modules},
        lambda row: -np.inf if row.output_sqnr_db is None else -row.output_sqnr_db,
    ).values()
    kinds, blocks = grid_of([row.module for row in rows])
    tables = (
        ("Output SQNR as stored (dB)", {row.module: row.output_sqnr_db for row in rows}),
        ("Plain round-to-nearest (dB)", {r.module: r.baseline_output_sqnr_db for r in rows}),
    )
    grids = [
        np.array([[number(values.get(blocks[b].get(k, ""))) for b in blocks] for k in kinds])
        for _, values in tables
    ]
    known = np.concatenate([grid[np.isfinite(grid)] for grid in grids])
    limits = (known.min(), known.max()) if known.size else (0.0, 1.0)
    panels = [new_panel(1.0 + 0.34 * len(kinds), 2) for _ in tables]
    for axes, grid, (title, _) in zip(panels, grids, tables, strict=True):
        heat_map(axes, grid, list(blocks), kinds, limits, "{:.0f}")
        axes.set_title(title)
        axes.set_xlabel("block")
    return panels
