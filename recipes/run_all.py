"""Run every shipped recipe on a model, and print one table of what each costs.

    python -m recipes.run_all /folder/of/the/model --output output/mine

Each recipe runs as `ptq run` does, in a process of its own, into a folder of its name below the
output, with what it printed beside it (`NAME.log`). Recipes that have a report there already are
not run again, so a stopped command goes on where it was. The table is `ptq compare`'s: figures are
factors of the float model's, KL divergences in nats; a run that misses its thresholds is in it,
too. Exit codes: 0 where all recipes ran, 2 where some could not.
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
from ptq.output import REPORT_FOLDER, is_taken
from ptq.recipe.shipped import shipped_paths
from ptq.report import comparison

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
    parser.add_argument("model", type=Path, help="folder of a float model")
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
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
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


def run_recipe(name: str, arguments: argparse.Namespace) -> str | None:
    """Run one recipe into its folder; says why it has no report, if it has none."""
    output = arguments.output / name
    if (output / REPORT).exists():
        return None
    settings = [f"model.path={arguments.model.resolve()}", *arguments.set]
    command = [sys.executable, "-m", "ptq", "run", name, "--output", str(output.resolve())]
    command += [word for setting in settings for word in ("--set", setting)]
    command += ["--quiet", *(["--force"] if is_taken(output) else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    text = done.stdout + done.stderr
    (arguments.output / f"{name}.log").write_text(text, encoding="utf-8")
    if done.returncode in (0, 1) and (output / REPORT).exists():
        return None
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error")), (lines or ["no output"])[-1])


def main(argv: Sequence[str] | None = None) -> int:
    """Run what has no report yet, and print the table of all; 2 where a recipe could not run."""
    arguments = parse_args(argv)
    names = recipes_to_run(arguments.recipes)
    arguments.output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        done = pool.map(partial(run_recipe, arguments=arguments), names)
        found = dict(zip(names, tqdm(done, total=len(names), unit="recipe"), strict=True))
    ran = [arguments.output / name for name, reason in found.items() if reason is None]
    if ran:
        text = comparison.markdown(comparison.table(comparison.load_reports(ran)))
        print(text, end="")
        if arguments.markdown is not None:
            replace_file(arguments.markdown, text.encode())
    failed = {name: reason for name, reason in found.items() if reason is not None}
    for name, reason in failed.items():
        print(f"FAILED: {name}: {reason} (see {arguments.output / name}.log)")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
