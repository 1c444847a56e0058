"""Write what recipes' certificates say into `RESULTS.md`, from `certified.csv`.

    python -m recipes.run_all MODEL --output output/all --set report.certificate=quick --record
    python -m recipes.certified

Each table stands below a line `<!-- certificates: MODEL -->`; a row of it is one checkpoint's
`certificate.json`, its figures in short.
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from formats.command import run_command
from formats.files import replace_file
from formats.namespace import ROOT
from ptq.certify.certificate import Certificate
from ptq.certify.figures import Figure
from recipes import results

TABLE = ROOT / "recipes" / "certified.csv"
NO_LOOP, LENGTH, EQUAL = "answers.no_loop", "answers.length", "answers.equal"
FIGURES = {
    "KL of prose": "kl.prose",
    "of code": "kl.code",
    "of chat": "kl.chat",
    "99.9%": "kl.p999",
    "answers equal": EQUAL,
    "their length": LENGTH,
    "loops": NO_LOOP,
    "JSON that fits": "objects.fit",
    "needle": "needle.chosen",
}


def cell(figure: Figure | None) -> str:
    """A figure in short: KL divergences in nats, lengths as a factor, shares of the original and
    of the quantized model."""
    if figure is None or figure.original is None or figure.quantized is None:
        return ""
    if figure.name.startswith("kl."):
        return f"{figure.quantized:.4f}"
    if figure.name == LENGTH:
        return f"x {math.exp(figure.quantized - figure.original):.2f}"
    if figure.name == EQUAL:
        return f"{figure.quantized:.0%}"
    both = [figure.original, figure.quantized]
    shares = [1 - share for share in both] if figure.name == NO_LOOP else both
    return " / ".join(f"{share:.0%}" for share in shares)


def row_of(model: str, recipe: str, found: Certificate) -> dict[str, str]:
    """A certificate as a row of the table."""
    figures, made = {figure.name: figure for figure in found.figures}, found.made
    beyond = (f"{f.name} ({f.verdict})" for f in found.figures if f.verdict in ("red", "amber"))
    return {
        "model": model,
        "recipe": recipe,
        "verdict": found.verdict,
        **{title: cell(figures.get(name)) for title, name in FIGURES.items()},
        "beyond their limit": ", ".join(beyond),
        "level": made.level,
        "device": str(made.environment.get("gpu", made.environment["processor"])),
        "made": made.when.split()[0],
        "version": made.version,
        "seconds": f"{made.seconds:.0f}",
    }


def certified_rows(table: Path | None = None) -> list[dict[str, str]]:
    """All rows of the table; none where there is no table."""
    file = table or TABLE
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def record(rows: Iterable[dict[str, str]], table: Path | None = None) -> None:
    """Put rows, one at the least, in the place of those of the same model and recipe."""
    kept = {(r["model"], r["recipe"]): r for r in [*certified_rows(table), *rows]}
    ordered = sorted(kept.values(), key=lambda r: (r["model"], float(r["KL of prose"])))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(ordered[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(ordered)
    replace_file(table or TABLE, text.getvalue().encode())


def written(page: str, table: Path | None = None) -> str:
    """The page with its tables as they are now; raises as `results.filled`."""
    rows, shown = certified_rows(table), ["recipe", "verdict", *FIGURES, "beyond their limit"]

    def markdown(model: str) -> str:
        own = [[row[name] for name in shown] for row in rows if row["model"] == model]
        lines = [shown, ["---"] * len(shown), *([f"`{name}`", *rest] for name, *rest in own)]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    models = {row["model"] for row in rows}
    return results.filled(page, "certificates", "place for the certificates", models, markdown)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page."""
    del argv
    page = results.PAGE
    replace_file(page, written(page.read_text(encoding="utf-8")).encode())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
