"""Untie: a head that is the embedding gets a tensor of its own, so that it alone is quantized.

A quantized head that is tied to the embedding is stored once for both, which other runtimes do not
read. Untied, the embedding stays in float, and the checkpoint is one that they read, at the cost of
the head's bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from formats.families.block_layers import split_name
from formats.modeling.layers import embedding_name, head_name
from ptq.methods.common.float_model import FloatModel, FloatModelView
from ptq.methods.common.spec import MethodSpec, PlannedLayer, Stage


class UntieSpec(MethodSpec):
    """Untie: gives a head that is the embedding its own tensor.

    YAML: ``untie``

    Other runtimes can then read a quantized `lm_head`; the embedding stays in float. Without it, a
    tied head and the embedding are one quantized tensor, which is smaller and runs here alone.
    """

    stage: ClassVar = Stage.ROTATE
    name: Literal["untie"] = "untie"

    def view(self, model: FloatModel) -> FloatModel:
        """The untied model."""
        return UntiedCheckpoint(model)

    def explain(self, layer: PlannedLayer) -> Iterator[str]:
        """What is said of the head."""
        if split_name(layer.name) is None:
            yield "untie: a tensor of its own, beside an embedding that stays in float"


class UntiedCheckpoint(FloatModelView):
    """A float model whose head is not its embedding; one that is untied is left as it is."""

    def __init__(self, source: FloatModel) -> None:
        super().__init__(source)
        self._head = f"{head_name(source.config)}.weight"
        self._embedding = f"{embedding_name(source.config)}.weight"
        self.unties = self._head not in source

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's, untied."""
        return {**self.source.config, "tie_word_embeddings": False}

    def describe(self) -> Iterator[str]:
        """What it costs."""
        yield from super().describe()
        if self.unties:
            added = math.prod(self.shape(self._head)) * self.dtype(self._head).itemsize / 1e6
            yield f"untied: lm_head, {added:.1f} MB in float, beside an embedding in float"

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, the head's among them."""
        return tuple(sorted({*self.source.names(), self._head}))

    def origin(self, name: str) -> str:
        """Name in the source: the head is the embedding."""
        return self._embedding if self.unties and name == self._head else name
