"""What a finished run knows of a model, to be solved again without running the model.

`statistics.safetensors` in a run's output holds the statistics of the model as it came, and as it
was where samples ran again after a method; `hessians/<block>.safetensors` the second moments of its
inputs, where a method used them and they are small or the recipe asks for them; `found.safetensors`
what methods found by running samples (`ptq.pipeline.found`). `ptq.commands.solve` takes them in
place of the samples.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from calibrate.statistics import AFTER, Statistics
from formats.errors import CheckpointError
from formats.files import writing
from formats.stored.safetensors_files import write_tensors
from ptq.methods.common.block import BlockWork
from ptq.methods.common.float_model import FloatModel
from ptq.methods.common.method import Method
from ptq.methods.common.moments import Moments
from ptq.methods.common.spec import MethodSpec
from ptq.methods.registry import block_methods
from ptq.output import STATISTICS_FILE
from ptq.pipeline.found import Found
from ptq.pipeline.key import model_key
from ptq.recipe.schema import Recipe
from ptq.result import QuantizationRecord, load_record

HESSIANS_FOLDER = "hessians"


@dataclass(frozen=True)
class Artifact:
    """Statistics of a run, with the record of what they were taken from.

    Attributes:
        folder: The run's output folder.
        record: Of the run: its model and its tokens.
        statistics: Of every pass of the samples; see `calibrate.statistics.Statistics.at`.
        found: What its methods found.
    """

    folder: Path
    record: QuantizationRecord
    statistics: Statistics
    found: Found

    @classmethod
    def load(cls, folder: Path) -> Artifact:
        """Read what a run left.

        Raises:
            CheckpointError: a file of it is missing or damaged.
        """
        statistics = Statistics.load(folder / STATISTICS_FILE)
        return cls(folder, load_record(folder), statistics, Found.load(folder))

    def give(self, work: BlockWork, stage: str = "") -> None:
        """Let a block know what its samples would show.

        Args:
            work: The block.
            stage: The method after which they ran; '' for the model as it came.

        Raises:
            CheckpointError: the block's Hessians are damaged.
        """
        work.statistics = self.statistics.below(work.block.name).at(stage)
        work.moments, work.divisors = None, {}
        path = self.folder / HESSIANS_FOLDER / moments_file(work.block.name, stage)
        if path.is_file():
            moments = Moments(work.observed_for, work.targets, full=True)
            try:
                moments.restore(load_file(path, device=str(work.block.device)))
            except (OSError, SafetensorError, KeyError) as error:
                message = f"{path}: damaged ({error}). Run the recipe again to write it"
                raise CheckpointError(message) from error
            work.moments = moments

    def recall(self, work: BlockWork, spec: MethodSpec, method: Method) -> None:
        """Let a method take what it found in the run, in place of `solve`."""
        method.recall(work, self.found.of(work.block.name, spec.name))
        for row in self.record.smoothing:
            if row.method == spec.name and row.source.startswith(f"{work.block.name}."):
                work.tell(row)

    def fold(self, work: BlockWork, recipe: Recipe) -> None:
        """Fold into a float block what the run's methods found: as it was before it was rounded.

        Args:
            work: A block as `ptq.pipeline.passes.block_work` makes it of the run's plan.
            recipe: The run's.
        """
        self.give(work)
        for spec, method in block_methods(recipe.methods):
            if method.keeps == "factors":
                method.prepare(work)
                self.recall(work, spec, method)
                method.commit(work)


def moments_file(block: str, stage: str) -> str:
    """Name of the file with the second moments of a block, as seen after a method."""
    return f"{block}{AFTER}{stage}.safetensors" if stage else f"{block}.safetensors"


def save_hessians(folder: Path, work: BlockWork, stage: str) -> None:
    """Keep a block's second moments, if they are whole, in `folder`, for `keep_hessians`.

    Raises:
        CheckpointError: they cannot be written.
    """
    if work.moments is None or not work.moments.full:
        return
    path = folder / HESSIANS_FOLDER / moments_file(work.block.name, stage)
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        write_tensors(path, {k: t.cpu().contiguous() for k, t in work.moments.state().items()})


def seen_key(recipe: Recipe, checkpoint: FloatModel) -> str:
    """Tells the model that calibration saw: its files, and the views it is read through."""
    blocks = [spec for spec, _ in block_methods(recipe.methods)]
    views = [spec.model_dump_json() for spec in recipe.methods if spec not in blocks]
    return " ".join([model_key(checkpoint), *views])


def keep_hessians(made: Path, output: Path) -> None:
    """Put those that were made for a run into its output, in place of an earlier run's.

    A run that was stopped right after it had done so finds none that were made, and keeps its own.
    """
    if (made / HESSIANS_FOLDER).is_dir():
        drop_hessians(output)
        (made / HESSIANS_FOLDER).rename(output / HESSIANS_FOLDER)


def drop_hessians(output: Path) -> None:
    """Remove those of an earlier run."""
    shutil.rmtree(output / HESSIANS_FOLDER, ignore_errors=True)
