"""Lets our `kernels/` folder share its import name with Hugging Face's `kernels` package.

transformers probes an installed `kernels` when it is imported, so a regular package of ours under
that name would break it. Ours therefore carries no `__init__.py`: alone it is a namespace package,
and a foreign regular package, wherever it stands on the path, wins the name. In that case our
folder is appended to the foreign package's `__path__`, and `from kernels.ops import ...` finds it.
"""

import importlib
import importlib.util
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / "kernels"


def join_kernels() -> None:
    """Make `kernels.<module>` of this project importable; does nothing where it already is."""
    spec = importlib.util.find_spec("kernels")
    locations = spec.submodule_search_locations if spec else None
    if locations is not None and any(Path(path).resolve() == _FOLDER for path in locations):
        return
    package = importlib.import_module("kernels")
    if str(_FOLDER) not in package.__path__:
        package.__path__.append(str(_FOLDER))
