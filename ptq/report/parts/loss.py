"""The report's section on where the loss comes from: which kinds of layers, which blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes

from ptq.report.data import ReportData
from ptq.report.measured.attribution import Attribution, Part
from ptq.report.page.figure import ORIGINAL, QUANTIZED, draw_dot, new_panel
from ptq.report.page.section import Plot, Section, Table
from ptq.text import percent

TITLE = "Where the loss comes from"


def loss_section(data: ReportData) -> Section:
    """KL divergence of every part, or why it was not measured."""
    found = data.attribution
    if isinstance(found, str):
        return Section(TITLE, f"This was not measured: {found}.")
    shown = "KL divergence with one kind of layer, and with one block, quantized at a time"
    return Section(
        TITLE,
        "Mean KL divergence to the original, in nats, with one part quantized and all else in "
        "float: first one kind of layer in all blocks, with its inputs where they are quantized, "
        "or the cache; then one block with all that is in it. Each part is that of the checkpoint, "
        f"on its real kernels. {found.sequences} of the evaluation sequences, {found.tokens:,} "
        "predictions: fewer than the figures above rest on, and the same for every part. Parts "
        "need not add up to the whole: errors may cancel or build on each other.",
        (Plot("loss", shown, partial(_draw, found)),),
        (_table("kind", found.kinds, found), _table("block", found.blocks, found)),
    )


def _table(head: str, parts: Sequence[Part], found: Attribution) -> Table:
    total = sum(part.kl for part in parts)
    rows = [
        (part.name, f"{part.kl:.3g}", percent(part.kl / total, 0) if total else "")
        for part in parts
    ]
    rows += [
        ("sum of these", f"{total:.3g}", ""),
        ("all at once", f"{found.whole:.3g}", ""),
        ("nothing quantized", f"{found.unrounded:.2g}", ""),
    ]
    caption = f"By {head}"
    return Table((head, "KL, nats", "share of the sum"), rows, caption, folded=len(parts) > 5)


def _draw(found: Attribution) -> list[Axes]:
    """A dot for each part, beside a line for everything quantized."""
    panels = []
    for title, parts in (("One kind of layer", found.kinds), ("One block", found.blocks)):
        axes = new_panel(1.1 + 0.28 * len(parts), 2)
        for y, part in enumerate(reversed(parts)):
            draw_dot(axes, y, part.kl, None, QUANTIZED)
        axes.set_yticks(range(len(parts)), [part.name for part in reversed(parts)])
        axes.axvline(found.whole, color=ORIGINAL, linewidth=1)
        axes.annotate(
            "all ",
            (found.whole, 1),
            (0, -2),
            ("data", "axes fraction"),
            textcoords="offset points",
            ha="right",
            va="top",
            color=ORIGINAL,
            fontsize=9,
        )
        if min(part.kl for part in parts) > 0:
            axes.set_xscale("log")
        axes.margins(x=0.08, y=0.8 / len(parts))
        axes.set_title(f"{title} quantized: KL (nats)")
        panels.append(axes)
    return panels
