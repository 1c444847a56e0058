"""Where both models run to be compared."""

from __future__ import annotations

from formats.checkpoint.read import Checkpoint
from formats.errors import PTQError
from inference.backend import choose_backend
from inference.transformers_code.choose import read_shape
from ptq.plan.devices import on_gpu
from ptq.recipe.schema import DevicesSpec, Recipe


def report_devices(recipe: Recipe) -> tuple[str, ...]:
    """Where both models run to be compared, by torch's names; `auto` follows the recipe's own
    device, but for a GPU or a model that the engine's kernels do not take.
    """
    chosen = recipe.report.device
    if chosen == "auto":
        own = recipe.device
        chosen = own if isinstance(own, DevicesSpec) else "cuda" if on_gpu(recipe) else "cpu"
        if chosen == "cuda" and not _runs(recipe):
            return ("cpu",)
    if isinstance(chosen, str):
        return (chosen,)
    return tuple(f"cuda:{index}" for index in range(chosen.gpus)) if chosen.gpus else ("cpu",)


def _runs(recipe: Recipe) -> bool:
    """Whether the engine runs the recipe's model on a GPU here."""
    try:
        checkpoint = Checkpoint.open(recipe.model.folder)
        read_shape(checkpoint, choose_backend("cuda", checkpoint))
    except PTQError:
        return False
    return True
