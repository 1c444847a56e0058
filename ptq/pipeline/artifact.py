"""What a finished run knows of a model, to be solved again without running the model.

`statistics.safetensors` in a run's output holds the statistics of the model as it came, and
`hessians/<block>.safetensors` the second moments of its inputs where the recipe asked for them.
`ptq.commands.solve` takes them in place of the samples.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from calibrate.statistics import Statistics
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RecipeError
from formats.files import writing
from formats.stored.safetensors_files import write_tensors
from ptq.methods.common.block import BlockWork
from ptq.methods.common.float_model import FloatModel
from ptq.methods.common.moments import Moments
from ptq.methods.common.spec import MethodSpec
from ptq.methods.registry import block_methods
from ptq.output import STATISTICS_FILE
from ptq.pipeline.key import model_key
from ptq.recipe.schema import Recipe
from ptq.result import QuantizationRecord, load_record
from ptq.text import typed_path

HESSIANS_FOLDER = "hessians"


@dataclass(frozen=True)
class Artifact:
    """Statistics of a run, with the record of what they were taken from.

    Attributes:
        folder: The run's output folder.
        record: Of the run: its model and its tokens.
        statistics: Of the model as it came.
    """

    folder: Path
    record: QuantizationRecord
    statistics: Statistics

    @classmethod
    def load(cls, folder: Path) -> Artifact:
        """Read what a run left.

        Raises:
            CheckpointError: the record or the statistics are missing or damaged.
        """
        return cls(folder, load_record(folder), Statistics.load(folder / STATISTICS_FILE))

    def give(self, work: BlockWork) -> None:
        """Let a block know what its samples would show.

        Raises:
            CheckpointError: the block's Hessians are damaged.
        """
        work.statistics = self.statistics.below(work.block.name)
        path = self.folder / HESSIANS_FOLDER / f"{work.block.name}.safetensors"
        if path.is_file():
            moments = Moments(work.observed_for, work.targets, full=True)
            try:
                moments.restore(load_file(path, device=str(work.block.device)))
            except (OSError, SafetensorError, KeyError) as error:
                message = f"{path}: damaged ({error}). Run the recipe again to write it"
                raise CheckpointError(message) from error
            work.moments = moments


def save_hessians(folder: Path, work: BlockWork) -> None:
    """Keep a block's second moments.

    Raises:
        CheckpointError: they cannot be written.
    """
    assert work.moments is not None
    path = folder / HESSIANS_FOLDER / f"{work.block.name}.safetensors"
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        write_tensors(path, {k: t.cpu().contiguous() for k, t in work.moments.state().items()})


def seen_key(recipe: Recipe, checkpoint: FloatModel) -> str:
    """Tells the model that calibration saw: its files, and the views it is read through."""
    blocks = [spec for spec, _ in block_methods(recipe.methods)]
    views = [spec.model_dump_json() for spec in recipe.methods if spec not in blocks]
    return " ".join([model_key(checkpoint), *views])


def drop_hessians(folder: Path) -> None:
    """Remove those of an earlier run."""
    shutil.rmtree(folder / HESSIANS_FOLDER, ignore_errors=True)


def check_solvable(artifact: Artifact, recipe: Recipe) -> None:
    """Refuse what cannot be solved from statistics alone.

    Raises:
        RecipeError: tells everything that stands in the way.
    """
    problems = list(_obstacles(artifact, recipe))
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise RecipeError(
            f"{typed_path(artifact.folder)}: cannot be solved from its statistics:{lines}"
        )


def _without_samples(spec: MethodSpec, artifact: Artifact, recipe: Recipe) -> str:
    """How a recipe does without the samples of a method; as it did with them, if it did."""
    found = [row.alpha for row in artifact.record.smoothing if row.alpha is not None]
    way = spec.without_samples(found)
    if way is None:
        return "leave it out"
    advice, option = way
    index = [method.name for method in recipe.methods].index(spec.name)
    return f"{advice}, such as --set methods.{index}.{spec.name}.{option}"


def _obstacles(artifact: Artifact, recipe: Recipe) -> Iterator[str]:
    record, statistics = artifact.record, artifact.statistics
    if record.model_key != seen_key(recipe, Checkpoint.open(recipe.model.folder)):
        yield (
            f"{recipe.model.path} is not the model, or not as it was (rotated or not), that they "
            "were taken from"
        )
    seen = {stats.tokens for stats in statistics.values()}
    if seen != {record.calibration.tokens}:
        yield (
            f"its scheme needed no data: {max(seen, default=0)} of {record.calibration.tokens} "
            "tokens were observed. Run it with --set statistics.histograms=true"
        )
    methods = block_methods(recipe.methods)
    for spec, method in methods:
        if method.needs == "samples":
            fix = _without_samples(spec, artifact, recipe)
            yield f"{spec.name} runs samples through the model; {fix}"
        if method.moments != "none" and not (artifact.folder / HESSIANS_FOLDER).is_dir():
            yield (
                f"{spec.name} needs second moments, which that run did not keep. Run it with "
                "--set statistics.hessians=true"
            )
    observers, static = recipe.observers, recipe.static
    if not static or observers.by_absmax:
        return
    if any(method.folds for _, method in methods):
        yield "after smoothing only maxima are known; use the observer absmax, or leave methods out"
    if not all(stats.counted for stats in statistics.values()):
        yield (
            f"the observers {observers.input.method} and {observers.kv_cache.method} need "
            "histograms, which that run did not keep. Run it with --set statistics.histograms=true"
        )
