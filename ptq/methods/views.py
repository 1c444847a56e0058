"""Which views of the float model the methods of a recipe ask for."""

from __future__ import annotations

from collections.abc import Sequence

from formats.checkpoint.read import Checkpoint
from ptq.methods.biased import BiasedCheckpoint
from ptq.methods.rotation import RotatedCheckpoint
from ptq.methods.source import Source
from ptq.methods.specs import MethodSpec, RotationSpec, ShiftSpec


def source_of(checkpoint: Checkpoint, methods: Sequence[MethodSpec]) -> Source:
    """The model that blocks are read from.

    Raises:
        RecipeError: a method does not know this model.
    """
    source: Source = checkpoint
    for spec in methods:
        if isinstance(spec, RotationSpec):
            source = RotatedCheckpoint(source, spec)
        elif isinstance(spec, ShiftSpec):
            source = BiasedCheckpoint(source)
    return source
