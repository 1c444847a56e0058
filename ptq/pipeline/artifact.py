"""What a finished run knows of a model, to be solved again without running the model.

`statistics.safetensors` in a run's output holds the statistics of the original model, and as it
was where samples ran again after a method; `hessians/<block>.safetensors` the second moments of its
inputs, where a method used them and they are small or the recipe asks for them;
`fisher/<block>.safetensors` both Fisher factors of its layers and the gradients of its cache, where
the model ran backward, likewise. `ptq.commands.solve` takes them in place of the samples.

`found.safetensors` holds what each method found by running samples (`Method.found`): factors of
smoothing groups, ranges. A tensor's name is `<block>/<method>/<name>`; the header holds the part of
the recipe that decided on them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from calibrate.gradients import BlockGradients
from calibrate.statistics import AFTER, Statistics
from formats.errors import CheckpointError
from formats.files import replace_file, writing
from formats.stored.safetensors_files import write_tensors
from ptq.methods.common.block import BlockWork, Seen
from ptq.methods.common.method import Method
from ptq.methods.common.moments import Moments, WeightedMoments
from ptq.methods.common.spec import MethodSpec
from ptq.methods.registry import block_methods
from ptq.output import FOUND_FILE, STATISTICS_FILE
from ptq.recipe.schema import Recipe
from ptq.result import QuantizationRecord, load_record

HESSIANS_FOLDER = "hessians"
FISHER_FOLDER = "fisher"
KEPT_FOLDERS = (HESSIANS_FOLDER, FISHER_FOLDER)
INPUTS = "inputs"  # role of the first factor of a layer, beside the gradients' own roles

SETTINGS = ("methods", "scheme", "layers", "observers")  # keys of a recipe
HEADER = "ptq_found"


@dataclass(frozen=True)
class Found:
    """What a run's methods found.

    Attributes:
        settings: What decided on it: those of the recipe's keys that `SETTINGS` names.
        tensors: By `<block>/<method>/<name>`.
    """

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def under(cls, recipe: Recipe, tensors: Mapping[str, Tensor]) -> Found:
        """Of a run of a recipe."""
        settings = recipe.model_dump(mode="json", include=set(SETTINGS))
        return cls(settings, {name: own.cpu().contiguous() for name, own in tensors.items()})

    @classmethod
    def load(cls, output: Path) -> Found:
        """Read what a finished run left in its output folder.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        path = output / FOUND_FILE
        try:
            with safe_open(path, framework="pt") as file:
                settings = json.loads((file.metadata() or {})[HEADER])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path}: not a readable record of what a run found ({error}). Run the recipe "
                "again to write it"
            ) from error
        return cls(settings, tensors)

    def save(self, output: Path) -> None:
        """Write the file; it is replaced at once or not at all."""
        header = {HEADER: json.dumps(self.settings)}
        replace_file(output / FOUND_FILE, save(dict(self.tensors), metadata=header))

    def of(self, block: str, method: str) -> dict[str, Tensor]:
        """What a method found in a block, such as the factors of each group, by its source."""
        start = f"{block}/{method}/"
        return {
            name.removeprefix(start): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(start)
        }

    def options(self, method: str) -> dict[str, Any] | None:
        """Options with which the run searched; None of a method that it did not have."""
        return next((m for m in self.settings["methods"] if m["name"] == method), None)

    def same_methods(self, recipe: Recipe, count: int) -> bool:
        """Whether the first methods of a recipe are those of the run, options and all."""
        mine = recipe.model_dump(mode="json", include={"methods"})["methods"][:count]
        return self.settings["methods"][:count] == mine

    def differing(self, recipe: Recipe) -> list[str]:
        """Keys beside the methods in which a recipe is not the run's."""
        mine = recipe.model_dump(mode="json", include=set(SETTINGS))
        return [key for key in SETTINGS[1:] if mine[key] != self.settings[key]]

    def recalled(self, recipe: Recipe) -> list[str]:
        """Methods of a recipe that take what the run found, in the recipe's order.

        Those up to one must be the run's own; ranges hold for the run's scheme and observers only.
        """
        names, order = [], [spec.name for spec in recipe.methods]
        for spec, method in block_methods(recipe.methods):
            holds = method.keeps == "factors" or (
                method.keeps == "ranges" and not self.differing(recipe)
            )
            if holds and self.same_methods(recipe, order.index(spec.name) + 1):
                names.append(spec.name)
        return names


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
