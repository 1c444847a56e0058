"""The pre-flight check of a recipe's peers: interpreters and packages that are not there."""

from __future__ import annotations

from collections.abc import Iterator

from formats.errors import EngineError
from ptq.recipe.peers import PeerChoice
from ptq.recipe.schema import Recipe
from ptq.recipe.strict_yaml import Key


def check_peers(recipe: Recipe) -> Iterator[tuple[Key, str]]:
    """Peers that could not run, each with the command that makes them."""
    for i, choice in enumerate(recipe.report.peers):
        try:
            missing = choice.spec.missing(choice.interpreter)
        except EngineError as error:
            yield (
                ("report", "peers", i, "python"),
                f"{error}; give the path of the interpreter of an environment that has "
                f"{choice.spec.package}",
            )
            continue
        if missing:
            yield ("report", "peers", i), _advice(choice, missing)


def _advice(choice: PeerChoice, missing: list[str]) -> str:
    lacks = f"{choice.name} needs {', '.join(missing)}, which {choice.interpreter} does not have"
    if choice.python is not None:
        return f"{lacks}; install with `{choice.python} -m pip install {' '.join(missing)}`"
    if choice.spec.in_extra:
        return f"{lacks}; install with `pip install 'ptq[peers]'`"
    needed = " ".join(choice.spec.distributions)
    return (
        f"{lacks}. It pins other versions than this project; make an environment for it with "
        f"`python -m venv peer && peer/bin/python -m pip install {needed}`, and give "
        f"`{{name: {choice.name}, python: peer/bin/python}}`"
    )
