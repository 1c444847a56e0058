"""The report's section on where the loss comes from: which kinds of layers, which blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

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
    """A dot for each part, from zero on, beside a line for everything quantized."""
    panels = []
    for title, parts in (("One kind of layer", found.kinds), ("One block", found.blocks)):
        axes = new_panel(1.1 + 0.28 * len(parts), 2)
        for y, part in enumerate(reversed(parts)):
            draw_dot(axes, y, part.kl, None, QUANTIZED)
            place = {"xytext": (8, 0), "textcoords": "offset points"}
            axes.annotate(f"{part.kl:.2g}", (part.kl, y), va="center", fontsize=9, **place)
        axes.set_yticks(range(len(parts)), [part.name for part in reversed(parts)])
        axes.axvline(found.whole, color=ORIGINAL, linewidth=1)
        axes.text(
            found.whole, -0.85, "all at once ", ha="right", va="bottom", color=ORIGINAL, fontsize=9
        )
        axes.set_xlim(0, 1.15 * max(found.whole, *(part.kl for part in parts)) or 1.0)
        axes.set_ylim(-0.9, len(parts) - 0.4)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_title(f"{title} quantized: KL (nats)")
        panels.append(axes)
    return panels
