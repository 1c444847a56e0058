"""The certificate's page: verdict, figures, plots, on the report's page machinery."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes

from ptq.certify.certificate import Certificate
from ptq.certify.figures import Figure, Row, mean_by
from ptq.report.page import (
    LIMIT,
    ORIGINAL,
    QUANTIZED,
    Plot,
    Point,
    Section,
    Table,
    Top,
    draw_dot,
    drawn,
    html_page,
    new_panel,
)
from ptq.text import duration_text

HEADER = tuple("figure original quantized difference interval limit p verdict".split())
OUTCOMES = {"green": "passed", "amber": "passed", "red": "failed"}
TASKS = ("needle", "keys", "trace")
VERIFIED = "`ptq certify --verify` measures a sample again and compares every digit."
NOT_VERIFIED = "The device sums in no fixed order: another run gives other last digits."


def cells(figure: Figure) -> tuple[str, ...]:
    """A figure as a row of a table with `HEADER`."""
    low_high = "" if figure.interval is None else "{:+.3g} to {:+.3g}".format(*figure.interval)
    return (
        f"{figure.name}: {figure.title}",
        _number(figure.original, ""),
        _number(figure.quantized, ""),
        _number(figure.difference, "+"),
        low_high,
        _number(figure.limit, "+"),
        "" if figure.corrected is None else f"{figure.corrected:.2g}",
        figure.verdict,
    )


def _number(value: float | None, sign: str) -> str:
    return "" if value is None else f"{value:{sign}.3g}"


def summary_rows(certificate: Certificate) -> list[tuple[str, ...]]:
    """The terminal's table: verdicts first, then what has none."""
    order = ("red", "amber", "green", "untested", "shown")
    figures = sorted(certificate.figures, key=lambda f: order.index(f.verdict))
    return [HEADER, *map(cells, figures)]


def render(certificate: Certificate, title: str) -> str:
    """The page as HTML that needs nothing else."""
    sections = list(_sections(certificate))
    return html_page(_top(certificate, title), sections, drawn(sections))


def _top(certificate: Certificate, title: str) -> Top:
    made, light = certificate.made, certificate.verdict
    worst = [f for f in certificate.figures if f.verdict in ("red", "amber")]
    return Top(
        title=f"Certificate of {title}",
        line=f"{made.when} UTC, ptq {made.version}, level {made.level}, seed {made.seed}, "
        f"{made.device}; {duration_text(made.seconds)}",
        outcome=OUTCOMES.get(light, "open"),
        light=light if light in OUTCOMES else "grey",
        headline=certificate.headline,
        points=(
            *(Point(figure.name, f"{figure.title}: {figure.reason}.") for figure in worst),
            Point(
                "KL limit", f"{certificate.limit:.3g} nats in the mean: {certificate.limit_from}."
            ),
        ),
        tables=(),
    )


def _sections(certificate: Certificate) -> Sequence[Section]:
    text = [row for case in certificate.rows.get("text", ()) for row in case]
    found = [row for case in certificate.rows.get("contexts", ()) for row in case]
    rows = [cells(figure) for figure in certificate.figures]
    why = [(f.name, f.test, str(f.cases), f.reason) for f in certificate.figures]
    made = certificate.made
    files = [*made.weights.items(), (f"{made.against}: config.json", made.against_config)]
    return (
        Section(
            "Figures",
            "Both models were given the same prompts on the same engine. An interval is that of "
            "the difference, quantized less original. A figure is red where the whole interval is "
            "a loss beyond its limit and its test, corrected by Holm for all figures together, "
            "says so at 5%; untested where the original itself cannot do it.",
            tables=(
                Table(HEADER, rows),
                Table(("figure", "test", "cases", "reason"), why, "Tests and reasons", folded=True),
            ),
        ),
        Section(
            "KL divergence by position",
            "Dots are means over the stretch of positions, with 95% intervals; the line is the "
            "limit of any stretch.",
            plots=(
                Plot(
                    "kl_by_position",
                    "KL divergence by position, with intervals",
                    partial(_draw_kl, certificate.figures),
                ),
            )
            if text
            else (),
        ),
        Section(
            "Long contexts by depth",
            "The right answer's log probability less that of the likeliest of three others from "
            "the same context, by where it stands: 0 is the beginning, 1 the end.",
            plots=tuple(_depth_plots(found)),
        ),
        Section(
            "What was certified",
            "SHA-256 of the weight files, and of the original's configuration. "
            + (VERIFIED if certificate.made.invariant else NOT_VERIFIED),
            tables=(Table(("file", "SHA-256"), files),),
        ),
    )


def _draw_kl(figures: Sequence[Figure]) -> Sequence[Axes]:
    own = [f for f in figures if f.name.startswith("kl.") and f.quantized is not None]
    axes = new_panel(0.6 + 0.35 * len(own))
    for y, figure in enumerate(reversed(own)):
        assert figure.quantized is not None
        draw_dot(axes, y, figure.quantized, figure.interval, QUANTIZED)
        if figure.limit is not None:
            axes.plot([figure.limit], [y], "|", color=LIMIT, markersize=14, markeredgewidth=2)
    axes.set_yticks(range(len(own)), [f.title for f in reversed(own)])
    axes.set_xlabel("nats")
    positive = [f.quantized for f in own if f.quantized]
    if positive:
        axes.set_xscale("log")
    return [axes]


def _depth_plots(rows: Sequence[Row]) -> list[Plot]:
    tasks = [task for task in TASKS if any(f"{task}.margin" in row.values for row in rows)]
    return [
        Plot(f"depth_{task}", f"{task}: margin by depth", partial(_draw_depth, rows, task))
        for task in tasks
    ]


def _draw_depth(rows: Sequence[Row], task: str) -> Sequence[Axes]:
    panels = []
    for key in ("depth", "length"):
        means = mean_by(rows, f"{task}.margin", key)
        axes = new_panel(2.4, 2)
        for i, (name, color) in enumerate((("original", ORIGINAL), ("quantized", QUANTIZED))):
            axes.plot(
                list(means), [own[i] for own in means.values()], "o-", color=color, label=name
            )
        axes.axhline(0, color="#94a3b8", linewidth=1)
        axes.set_xlabel(f"{key}{' in tokens' if key == 'length' else ''}")
        axes.set_title(f"{task}: margin in nats")
        axes.legend()
        panels.append(axes)
    return panels
