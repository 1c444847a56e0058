"""The other layouts of a run's checkpoint that its recipe asks for."""

from __future__ import annotations

from formats.checkpoint.read import Checkpoint
from ptq.convert.convert import describe
from ptq.convert.to_gguf import to_gguf
from ptq.output import GGUF_FILE
from ptq.recipe.schema import OutputSpec
from ptq.result import QuantizationResult


def write_beside(result: QuantizationResult, wanted: OutputSpec, *, progress: bool) -> list[str]:
    """Write them; gives what there is to tell of each.

    Raises:
        CheckpointError: the disk refuses.
    """
    if wanted.format != "gguf":
        return []
    out = result.checkpoint.parent / GGUF_FILE
    done = to_gguf(Checkpoint.open(result.checkpoint), out, force=True, progress=progress)
    return describe(done, out, "gguf")
