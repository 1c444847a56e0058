"""What is in a run's output folder, by name; known without reading any of it."""

from __future__ import annotations

from pathlib import Path

from formats.errors import CheckpointError
from formats.files import LOCK_FILE, refuse_busy
from formats.hub import near_folder

CHECKPOINT_FOLDER = "checkpoint"
GGUF_FILE = "model.gguf"  # the checkpoint, where the recipe asks for it
RESULT_FILE = "quantization.json"
RECIPE_FILE = "recipe.yaml"
REPORT_FOLDER = "report"
CERTIFICATE_PAGE = "certificate.html"  # in the checkpoint, beside certificate.json
STATISTICS_FILE = "statistics.safetensors"
FOUND_FILE = "found.safetensors"  # what methods found by running samples
RESUME_FOLDER = ".resume"  # what a stopped run goes on with
GRADIENTS_FOLDER = ".gradients"  # what its backward pass showed
PROGRESS_FILE = "progress.json"  # in it: how far that run has come
BUDGET_FOLDER = "budget"  # what a recipe with a budget chooses from
COSTS_FILE = "costs.json"  # in it: what each choice costs
PEER_LOGS, PEERS_FILE = "peers", "peers.json"  # what `ptq peers` writes


def unfinished(output: Path) -> bool:
    """Whether a run of this output folder was stopped before its end."""
    return (output / RESUME_FOLDER / PROGRESS_FILE).is_file()


def require_run(output: Path) -> None:
    """Check that a run has ended in an output folder.

    Raises:
        CheckpointError: it has not, another process works there, or there is no such folder.
    """
    if (output / RESULT_FILE).is_file():
        return
    refuse_busy(output)
    if not output.is_dir():
        found = f"no such folder; {near_folder(output)}give"
    elif unfinished(output):
        found = "its run has not ended; the same `ptq run` goes on where it was stopped, or give"
    elif (output.parent / RESULT_FILE).is_file():
        found = f"found no {RESULT_FILE}; did you mean {output.parent}? Give"
    else:
        found = f"found no {RESULT_FILE}; give"
    raise CheckpointError(f"{output}: {found} the output folder of a finished `ptq run`")


def title_of(checkpoint: Path) -> str:
    """What a checkpoint's folder is called, or where that says nothing the run's output."""
    folder = checkpoint.absolute()
    return folder.parent.name if folder.name == CHECKPOINT_FOLDER else folder.name


def kept_bytes(output: Path) -> int:
    """Size of what a stopped run has left to go on with."""
    folders = (output / RESUME_FOLDER, output / GRADIENTS_FOLDER)
    files = (path for folder in folders for path in folder.rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file())


def is_taken(path: Path) -> bool:
    """Whether an output path holds anything but a run to go on with, or what `ptq peers` wrote.

    A run that was killed before it had stored anything, or while it removed what it had, leaves the
    folder of what is stored, with nothing in it to trust.
    """
    if unfinished(path) or not path.exists():
        return False
    own = {PEER_LOGS, PEERS_FILE, RESUME_FOLDER, GRADIENTS_FOLDER, BUDGET_FOLDER, LOCK_FILE}
    return not path.is_dir() or any(entry.name not in own for entry in path.iterdir())
