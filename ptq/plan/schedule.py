"""When the samples run through a block, and what is seen of them: follows from the recipe alone.

The driver goes by it, and so does the prediction of the memory that a run takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ptq.methods.common.method import Method
from ptq.methods.registry import block_methods
from ptq.recipe.schema import Recipe

KEPT_MOMENTS = 10**9  # most bytes of second moments that are kept without being asked for


COMPARED = 4  # sequences on which quantized layers are compared with float ones


@dataclass(frozen=True)
class Schedule:
    """What a recipe and its block methods ask of the samples."""

    recipe: Recipe
    methods: Sequence[Method]

    @classmethod
    def of(cls, recipe: Recipe) -> Schedule:
        """That of a recipe that is not yet run."""
        return cls(recipe, [method for _, method in block_methods(recipe.methods)])

    @property
    def passes(self) -> list[int]:
        """Methods before which (or the end, before which) the samples must run again.

        That is after those that changed the float block, unless what was seen before tells what
        would be seen now.
        """
        return [
            i + 1
            for i, method in enumerate(self.methods)
            if method.folds and not self._follows(method)
        ]

    @property
    def runs(self) -> int:
        """How often the samples run."""
        return 1 + len(self.passes)

    @property
    def samples(self) -> int:
        """Calibration sequences that run: only those that are compared, where that suffices."""
        wanted = self.recipe.dataset.calibration.samples
        return wanted if self.needs_data else min(wanted, COMPARED)

    def counts(self, first: int) -> bool:
        """Whether the pass for the methods from `first` on counts magnitudes, or keeps maxima."""
        if self.recipe.statistics.histograms:
            return True
        return self.recipe.static and (first == 0 or not self.by_maxima)  # the artifact keeps both

    @property
    def full_moments(self) -> bool:
        """Whether a method uses whole second moments of inputs."""
        return any(method.moments == "full" for method in self.methods)

    @property
    def by_maxima(self) -> bool:
        """Whether static scales follow from maxima alone, and cut nothing."""
        return self.recipe.observers.by_absmax and not any(m.clips for m in self.methods)

    @property
    def gradients(self) -> bool:
        """Whether the model is run backward before the first block is solved."""
        wanted = any(method.gradients for method in self.methods)
        return wanted or self.recipe.statistics.gradients is True

    @property
    def needs_data(self) -> bool:
        """Whether anything follows from the calibration data but the errors that are reported."""
        keep = self.recipe.statistics
        kept = keep.histograms or keep.hessians is True
        needed = any(method.needs != "weights" for method in self.methods)
        return kept or needed or self.recipe.static or self.recipe.sums_keys or self.gradients

    def _follows(self, method: Method) -> bool:
        return method.rescales and (self.by_maxima or not self.recipe.static)
