"""What a finished run knows of a model, to be solved again without running the model.

`statistics.safetensors` in a run's output holds the statistics of the original model, and as it
was where samples ran again after a method; `hessians/<block>.safetensors` the second moments of its
inputs, where a method used them and they are small or the recipe asks for them;
`fisher/<block>.safetensors` both Fisher factors of its layers and the gradients of its cache, where
the model ran backward, likewise; `found.safetensors` what methods found by running samples
(`ptq.pipeline.found`). `ptq.commands.solve` takes them in place of the samples.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from calibrate.gradients import BlockGradients
from calibrate.statistics import AFTER, Statistics
from formats.errors import CheckpointError
from formats.files import writing
from formats.stored.safetensors_files import write_tensors
from ptq.methods.common.block import BlockWork, Seen
from ptq.methods.common.fisher import WeightedMoments
from ptq.methods.common.method import Method
from ptq.methods.common.moments import Moments
from ptq.methods.common.spec import MethodSpec
from ptq.methods.registry import block_methods
from ptq.output import STATISTICS_FILE
from ptq.pipeline.found import Found
from ptq.recipe.schema import Recipe
from ptq.result import QuantizationRecord, load_record

HESSIANS_FOLDER = "hessians"
FISHER_FOLDER = "fisher"
KEPT_FOLDERS = (HESSIANS_FOLDER, FISHER_FOLDER)
INPUTS = "inputs"  # role of the first factor of a layer, beside the gradients' own roles


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
            stage: The method after which they ran; '' for the original model.

        Raises:
            CheckpointError: the block's Hessians or Fisher factors are damaged.
        """
        seen = work.seen = Seen(self.statistics.below(work.block.name).at(stage))
        with self._tensors(HESSIANS_FOLDER, work, stage) as found:
            if found:
                seen.moments = Moments(work.observed_for, work.targets, full=True)
                seen.moments.restore(found)
        with self._tensors(FISHER_FOLDER, work, stage) as found:
            inputs = [key for key in found if key.endswith(f"/{INPUTS}")]
            if found:
                known = {key.removesuffix(f"/{INPUTS}"): found.pop(key) for key in inputs}
                seen.weighted = WeightedMoments.restored(known, work.targets)
                if not stage:
                    work.gradients = BlockGradients.from_state(found)

    @contextmanager
    def _tensors(self, folder: str, work: BlockWork, stage: str) -> Iterator[dict[str, Tensor]]:
        """What a file of a block holds; nothing where there is none.

        Raises:
            CheckpointError: it is damaged, or whoever takes it misses something.
        """
        path = self.folder / folder / moments_file(work.block.name, stage)
        try:
            yield load_file(path, device=str(work.block.device)) if path.is_file() else {}
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            message = f"{path}: damaged ({error}). Run the recipe again to write it"
            raise CheckpointError(message) from error

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


def save_moments(folder: Path, kinds: Sequence[str], work: BlockWork, stage: str) -> None:
    """Keep what a block's samples showed, for `keep_moments`.

    Args:
        folder: Where to, after `expect_moments`.
        kinds: Of `KEPT_FOLDERS`: second moments, if they are whole, and both Fisher factors.
        stage: The method after which the samples ran; '' for the original model.

    Raises:
        CheckpointError: they cannot be written.
    """
    file, seen = moments_file(work.block.name, stage), work.seen
    if HESSIANS_FOLDER in kinds and seen.moments is not None and seen.moments.full:
        _save(folder / HESSIANS_FOLDER / file, seen.moments.state())
    if FISHER_FOLDER in kinds and seen.weighted is not None and work.gradients is not None:
        inputs = {f"{name}/{INPUTS}": a for name, a in seen.weighted.state().items()}
        gradients = {} if stage else work.gradients.state(weights=False)
        _save(folder / FISHER_FOLDER / file, inputs | gradients)


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with writing(path.parent):
        path.unlink(missing_ok=True)
        write_tensors(path, {k: t.cpu().contiguous() for k, t in tensors.items()})


def expect_moments(made: Path) -> None:
    """Make the folders for `save_moments`, so that `keep_moments` replaces all of an earlier run's.

    Raises:
        CheckpointError: they cannot be made.
    """
    for name in KEPT_FOLDERS:
        with writing(made / name):
            (made / name).mkdir(parents=True, exist_ok=True)


def keep_moments(made: Path, output: Path) -> None:
    """Put those that were made for a run into its output, in place of an earlier run's.

    A run that was stopped right after it had done so finds none that were made, and keeps its own.
    """
    for name in (name for name in KEPT_FOLDERS if (made / name).is_dir()):
        shutil.rmtree(output / name, ignore_errors=True)
        (made / name).rename(output / name)
        with suppress(OSError):  # what the run had no use for
            (output / name).rmdir()


def drop_moments(output: Path) -> None:
    """Remove those of an earlier run."""
    for name in KEPT_FOLDERS:
        shutil.rmtree(output / name, ignore_errors=True)
