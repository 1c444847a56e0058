"""The pre-flight check of a recipe's peers: interpreters and packages that are not there."""

from __future__ import annotations

from collections.abc import Iterator

from formats.errors import EngineError
from inference.bench.peers.interpreter import installed
from ptq.peers.process import interpreter
from ptq.peers.specs import PeerSpec
from ptq.recipe.schema import Recipe
from ptq.recipe.strict_yaml import Key


def check_peers(recipe: Recipe) -> Iterator[tuple[Key, str]]:
    """Peers that could not run, each with the command that makes them."""
    for i, spec in enumerate(recipe.report.peers):
        try:
            versions = installed(interpreter(spec), spec.peer.distributions)
        except EngineError as error:
            yield (
                ("report", "peers", i, "python"),
                f"{error}; give the path of the interpreter of an environment that has "
                f"{spec.peer.package}",
            )
            continue
        missing = [name for name, version in versions.items() if version is None]
        if missing:
            yield ("report", "peers", i), _advice(spec, missing)


def _advice(spec: PeerSpec, missing: list[str]) -> str:
    lacks = f"{spec.name} needs {', '.join(missing)}, which {interpreter(spec)} does not have"
    if spec.python is not None:
        return f"{lacks}; install with `{spec.python} -m pip install {' '.join(missing)}`"
    if spec.peer.in_extra:
        return f"{lacks}; install with `pip install 'ptq[peers]'`"
    needed = " ".join(spec.peer.distributions)
    return (
        f"{lacks}. It pins other versions than this project; make an environment for it with "
        f"`python -m venv peer && peer/bin/python -m pip install {needed}`, and give "
        f"`{{name: {spec.name}, python: peer/bin/python}}`"
    )
