"""Write what recipes were measured to cost into `RESULTS.md`, from `measured.csv`.

    python -m recipes.results

Each table stands below a line `<!-- table: MODEL -->`. Rows come from `python -m recipes.run_all
MODEL --record`. A plot of each model whose sizes are known is drawn beside the page
(`results-MODEL.svg`); that of the default model has other tools in it and is `ptq compare`'s.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence

import pandas as pd

from formats.command import run_command
from formats.errors import RecipeError
from formats.files import replace_file
from formats.namespace import ROOT
from ptq.report import comparison, scatter
from ptq.report.data import ReportData
from ptq.report.known import Known, known_figures, write_figures

PAGE = ROOT / "recipes" / "RESULTS.md"
DEFAULT = "tiny-python"
FOUR_BITS = " ¹"  # beside int4 schemes of a model whose weights had 4 bits before


def row_of(recipe: str, report: ReportData, *, model: str, text: str, original_bits: int) -> Known:
    """What a finished run tells of its recipe.

    Args:
        recipe: The shipped recipe's name.
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


def written(page: str) -> str:
    """The page with its tables as they are now; raises as `filled`."""
    models = {row.model for row in known_figures()}
    return filled(page, "table", "table", models, lambda m: comparison.markdown(frame_of(m)))


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
    for model in sorted({row.model for row in known_figures()} - {DEFAULT}):
        frame = frame_of(model).dropna(subset=["weights"])
        if not frame.empty:
            replace_file(PAGE.parent / f"results-{model}.svg", scatter.draw(frame).encode())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
