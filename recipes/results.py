"""Write what recipes cost, and what their certificates say, into `RESULTS.md`.

    python -m recipes.results

Each table of costs stands below a line `<!-- table: MODEL -->`, from `measured.csv`; each of
certificates below a line `<!-- certificates: MODEL -->`, from `certified.csv`, where a row is one
checkpoint's `certificate.json`, its figures in short. Rows of both come from `python -m
recipes.run_all MODEL --record`. A plot of each model whose sizes are known is drawn beside
the page: `results-MODEL.svg`, and `results.svg` of the default model.
"""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence

import pandas as pd

from formats.command import run_command
from formats.errors import RecipeError
from formats.files import replace_file
from formats.namespace import ROOT
from ptq.certify.certificate import Certificate
from ptq.certify.figures import Figure
from ptq.report import comparison
from ptq.report.data import ReportData
from ptq.report.known import Known, known_figures, write_figures

PAGE = ROOT / "recipes" / "RESULTS.md"
DEFAULT = "tiny-python"
FOUR_BITS = " ¹"  # beside int4 schemes of a model whose weights had 4 bits before
CERTIFIED = ROOT / "recipes" / "certified.csv"
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


def row_of(recipe: str, report: ReportData, *, model: str, text: str, original_bits: int) -> Known:
    """What a finished run tells of its recipe.

    Args:
        text: What kind of text it was measured on.
        original_bits: Bits of a weight in the file that the model was made from.
    """
    figures, accuracy = comparison.row_of(recipe, report), report.accuracy
    ratio, kl = accuracy.perplexity_ratio_ci, accuracy.kl_mean_ci
    length = accuracy.tokens // accuracy.sequences + 1
    return Known(
        model=model,
        family=report.model.model_type,
        parameters=report.model.parameters,
        original_bits=original_bits,
        recipe=recipe,
        scheme=figures["scheme"],
        methods=figures["methods"],
        weights=round(figures["weights"], 4),
        cache=round(figures["cache"], 4),
        perplexity=round(figures["perplexity"], 6),
        perplexity_low=ratio and round(ratio[0], 6),
        perplexity_high=ratio and round(ratio[1], 6),
        kl=float(f"{figures['kl']:.4g}"),
        kl_low=kl and float(f"{kl[0]:.4g}"),
        kl_high=kl and float(f"{kl[1]:.4g}"),
        top1=round(figures["top1"], 4),
        prefill=figures["prefill"] and round(figures["prefill"], 2),
        decode=figures["decode"] and round(figures["decode"], 2),
        seconds=round(figures["seconds"], 1),
        text=f"{text}, {accuracy.sequences} x {length} tokens",
        device=report.provenance.device,
        made=report.provenance.made.split()[0],
        version=report.provenance.versions["ptq"],
    )


def record(rows: Iterable[Known]) -> None:
    """Put rows in the place of those of the same model and recipe."""
    kept = {(row.model, row.recipe): row for row in known_figures()}
    kept |= {(row.model, row.recipe): row for row in rows}
    write_figures(kept.values())


def frame_of(model: str) -> pd.DataFrame:
    """What was measured on a model, as `ptq.report.comparison.table` has it."""
    names = ("scheme", "methods", "weights", "cache", "perplexity", "kl", "top1", "prefill")
    rows = [row for row in known_figures() if row.model == model]
    return pd.DataFrame(
        {"run": row.recipe, **{name: getattr(row, name) for name in (*names, "decode", "seconds")}}
        | {"scheme": row.scheme + FOUR_BITS * row.flattered}
        for row in rows
    )


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


def certificate_row(model: str, recipe: str, found: Certificate) -> dict[str, str]:
    """A certificate as a row of its table."""
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


def certificate_rows() -> list[dict[str, str]]:
    """All rows of the table; none where there is no table."""
    if not CERTIFIED.exists():
        return []
    with CERTIFIED.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def record_certificates(rows: Iterable[dict[str, str]]) -> None:
    """Put rows, one at the least, in the place of those of the same model and recipe."""
    kept = {(r["model"], r["recipe"]): r for r in [*certificate_rows(), *rows]}
    ordered = sorted(kept.values(), key=lambda r: (r["model"], float(r["KL of prose"])))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(ordered[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(ordered)
    replace_file(CERTIFIED, text.getvalue().encode())


def written(page: str) -> str:
    """The page with its tables as they are now; raises as `filled`."""
    models = {row.model for row in known_figures()}
    page = filled(page, "table", "table", models, lambda m: comparison.markdown(frame_of(m)))
    return with_certificates(page)


def with_certificates(page: str) -> str:
    """The page with its tables of certificates as they are now; raises as `filled`."""
    rows, shown = certificate_rows(), ["recipe", "verdict", *FIGURES, "beyond their limit"]

    def markdown(model: str) -> str:
        own = [[row[name] for name in shown] for row in rows if row["model"] == model]
        lines = [shown, ["---"] * len(shown), *([f"`{name}`", *rest] for name, *rest in own)]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    models = {row["model"] for row in rows}
    return filled(page, "certificates", "place for the certificates", models, markdown)


def filled(
    page: str, kind: str, title: str, models: Collection[str], table: Callable[[str], str]
) -> str:
    """The page with the table of each model below its line `<!-- KIND: MODEL -->`.

    Raises:
        RecipeError: a model has no place in the page.
    """
    place = re.compile(rf"<!-- {kind}: (\S+) -->\n(?:\|.*\n)*")
    missing = {*models} - {*place.findall(page)}
    if missing:
        name = min(missing)
        raise RecipeError(
            f"RESULTS.md has no {title} of {name}; write the line `<!-- {kind}: {name} -->` where "
            "it is to stand, and say there what it was measured on"
        )
    return place.sub(lambda found: f"<!-- {kind}: {found[1]} -->\n{table(found[1])}", page)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and the plots."""
    del argv
    replace_file(PAGE, written(PAGE.read_text(encoding="utf-8")).encode())
    for model in sorted({row.model for row in known_figures()}):
        frame = frame_of(model).dropna(subset=["weights"])
        name = "results.svg" if model == DEFAULT else f"results-{model}.svg"
        if not frame.empty:
            replace_file(PAGE.parent / name, comparison.draw(frame).encode())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
