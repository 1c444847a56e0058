"""`ptq peers`: measures what other tools make of a recipe's model, without a run of our own.

    ptq peers RECIPE [--peer NAME[=PYTHON]]... [--set KEY=VALUE]... [--output DIR]

The recipe gives the model, the tokens, and the peers in `report.peers`; `--peer` names others
instead. PYTHON is the interpreter of the environment that has the peer's package, where it is not
this one. `peers.json` goes to the output path of the recipe, what the peers print below `peers/`
beside it; `ptq compare` puts them into one table with runs of recipes on the same model and tokens.
Exit codes: 0 where all peers ran, 1 where one could not, 2 for errors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from formats.command import CommandParser
from formats.errors import RecipeError
from formats.files import output_locked, replace_file
from formats.namespace import later
from ptq.commands.shared import add_quiet, add_recipe_arguments, overrides_of
from ptq.output import PEERS_FILE
from ptq.recipe.draft import Override
from ptq.recipe.peers import QUANTIZERS
from ptq.recipe.reading import LoadedRecipe, read_recipe
from ptq.text import format_table, typed_path

with later():
    import ptq.plan.plan as planning
    import ptq.report.report as reporting
    from ptq.report.parts import accuracy as rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure peers and print their table; 0 where all of them ran."""
    arguments = parser().parse_args(argv)
    loaded = _read(arguments)
    with output_locked(loaded.recipe.output.path):
        return _measure(loaded, not arguments.quiet)


def _measure(loaded: LoadedRecipe, progress: bool) -> int:
    plan = planning.plan_recipe(loaded, force=True, solves=False)
    record = reporting.measure_only_peers(plan, progress=progress)
    path = plan.recipe.output.path / PEERS_FILE
    replace_file(path, (record.model_dump_json(indent=1) + "\n").encode())
    print(format_table([rows.PEER_HEADS, *rows.peer_rows(record.peers)]))
    print()
    failed = [row for row in record.peers if row.error]
    for row in failed:
        print(f"{row.name} could not run: {row.error}")
    print(f"peers: {typed_path(path)}")
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq peers`."""
    codes = "Exit codes: 0 all peers ran, 1 one of them could not, 2 errors."
    about, names = (__doc__ or "").split("\n\n")[0], ", ".join(QUANTIZERS)
    made = CommandParser(prog="ptq peers", description=about, epilog=f"Peers: {names}. {codes}")
    add_recipe_arguments(made)
    peer = "measure this one instead of those of the recipe, under its own interpreter if one is "
    peer += "given; may be repeated"
    made.add_argument("--peer", action="append", default=[], metavar="NAME[=PYTHON]", help=peer)
    add_quiet(made)
    return made


def _read(arguments: argparse.Namespace) -> LoadedRecipe:
    """The recipe with its overrides.

    Raises:
        RecipeError: it is invalid, or names no peer.
    """
    overrides = overrides_of(arguments)
    if arguments.peer:
        pairs = (text.partition("=")[::2] for text in arguments.peer)
        named = [{"name": name} | ({"python": python} if python else {}) for name, python in pairs]
        peers = json.dumps(named)
        given = " ".join(f"--peer {text}" for text in arguments.peer)
        overrides.append(Override(f"report.peers={peers}", given))
    loaded = read_recipe(arguments.recipe, overrides)
    if not loaded.recipe.report.peers:
        raise RecipeError(
            f"{arguments.recipe}: found no peers in report.peers; name some there, or give "
            f"--peer NAME. Allowed: {', '.join(QUANTIZERS)}"
        )
    return loaded.pinned()
