"""Run every shipped recipe on models, and print a table for each of what they cost.

    python -m recipes.run_all /folder/of/the/model --output output/mine
    python -m recipes.run_all MODEL OTHER --output output/all --record --text 'English prose'

Each recipe runs as `ptq run` does, in a process of its own, into a folder of its name below the
output, with what it printed beside it (`NAME.log`). Recipes that have a report there already are
not run again, so a stopped command goes on where it was. The table is `ptq compare`'s: figures are
factors of the float model's, KL divergences in nats; a run that is red is in it, too. Of several
models each has a folder of its own below the output. `--record` keeps the figures in
`measured.csv`, by which other runs are judged, and certificates that were made (`--set
report.certificate=quick`) in `certified.csv`, and writes `RESULTS.md` again. Exit codes: 0 where
all recipes ran, 2 where some could not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tqdm import tqdm

from formats.command import run_command
from formats.errors import RecipeError, suggestion
from formats.files import replace_file
from formats.namespace import ROOT
from ptq.certify.certificate import read_certificate
from ptq.output import CHECKPOINT_FOLDER, REPORT_FOLDER, is_taken
from ptq.recipe.own_model import shipped_paths
from ptq.report import comparison
from ptq.report.data import ReportData
from recipes import results

REPORT = Path(REPORT_FOLDER) / "report.json"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    summary, _, usage = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m recipes.run_all",
        description=summary,
        epilog=usage.strip("\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "models", nargs="+", type=Path, metavar="MODEL", help="folder of a float model"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for all runs")
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="these alone (default: all)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting of every recipe, such as device=cuda; may be repeated",
    )
    parser.add_argument("--jobs", type=int, default=1, help="recipes that run at once")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--record", action="store_true", help="keep the figures in measured.csv")
    parser.add_argument(
        "--text", default="Python's standard library", help="what they were measured on, in words"
    )
    parser.add_argument(
        "--original-bits",
        action="append",
        default=[],
        metavar="MODEL=BITS",
        help="bits of a weight in the file that a model was made from, where not 16",
    )
    return parser.parse_args(argv)


def recipes_to_run(wanted: Sequence[str] | None) -> list[str]:
    """Names of the recipes for one model: those of folders are for other purposes.

    Raises:
        RecipeError: a wanted one is not shipped.
    """
    names = [name for name in shipped_paths() if "/" not in name]
    for name in wanted or ():
        if name not in names:
            raise RecipeError(f"no recipe {name!r}; {suggestion(name, names)}")
    return list(wanted or names)


def run_recipe(name: str, model: Path, folder: Path, settings: Sequence[str]) -> str | None:
    """Run one recipe into its folder; says why it has no report, if it has none."""
    output = folder / name
    if (output / REPORT).exists():
        return None
    command = [sys.executable, "-m", "ptq", "run", name, "--output", str(output.resolve())]
    for setting in (f"model.path={model.resolve()}", *settings):
        command += ["--set", setting]
    command += ["--quiet", *(["--force"] if is_taken(output) else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    text = done.stdout + done.stderr
    (folder / f"{name}.log").write_text(text, encoding="utf-8")
    if done.returncode in (0, 1) and (output / REPORT).exists():
        return None
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error")), (lines or ["no output"])[-1])


def bits_of(models: Sequence[Path], given: Sequence[str]) -> dict[str, int]:
    """Bits of the original weights of each model, by its name.

    Raises:
        RecipeError: one is given for no model, or is no number.
    """
    found = {model.resolve().name: 16 for model in models}
    for text in given:
        name, _, bits = text.partition("=")
        if name not in found or not bits.isdigit():
            raise RecipeError(
                f"--original-bits {text}: needed is the name of a model and a number, such as "
                f"{min(found)}=4"
            )
        found[name] = int(bits)
    return found


def run_model(
    model: Path, folder: Path, names: Sequence[str], arguments: argparse.Namespace
) -> tuple[list[Path], list[str]]:
    """Run recipes on a model: outputs of those that ran, and why others did not."""
    folder.mkdir(parents=True, exist_ok=True)
    run = partial(run_recipe, model=model, folder=folder, settings=arguments.set)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        done = tqdm(pool.map(run, names), total=len(names), unit="recipe")
        found = dict(zip(names, done, strict=True))
    failed = [f"{n}: {why} (see {folder / n}.log)" for n, why in found.items() if why is not None]
    return [folder / name for name, why in found.items() if why is None], failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run what has no report yet, and print the table of all; 2 where a recipe could not run."""
    arguments = parse_args(argv)
    names, bits = (
        recipes_to_run(arguments.recipes),
        bits_of(arguments.models, arguments.original_bits),
    )
    several, tables, failed = len(arguments.models) > 1, list[str](), list[str]()
    for model in arguments.models:
        name = model.resolve().name
        folder = arguments.output / name if several else arguments.output
        ran, missing = run_model(model, folder, names, arguments)
        failed += missing
        if not ran:
            continue
        reports = comparison.load_reports(ran)
        table = comparison.markdown(comparison.table(reports))
        tables.append(f"{name}\n\n{table}" if several else table)
        if arguments.record:
            shared = {"model": name, "text": arguments.text, "original_bits": bits[name]}
            runs = {n: r for n, r in reports.items() if isinstance(r, ReportData)}
            results.record(results.row_of(n, report, **shared) for n, report in runs.items())
            found = ((path.name, read_certificate(path / CHECKPOINT_FOLDER)) for path in ran)
            if rows := [results.certificate_row(name, n, c) for n, c in found if c is not None]:
                results.record_certificates(rows)
    print("\n".join(tables), end="")
    if tables and arguments.markdown is not None:
        replace_file(arguments.markdown, "\n".join(tables).encode())
    if tables and arguments.record:
        results.main()
    for line in failed:
        print(f"FAILED: {line}")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
