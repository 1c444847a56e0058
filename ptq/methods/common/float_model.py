"""The float model that a run quantizes: a checkpoint as it is, or seen through a transform.

A transform that needs no data is a view of the checkpoint: it hands out other tensors, one at a
time, under the same interface. The driver, the methods and the report meet an ordinary model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from formats.modeling.own_classes import make_known

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig

    from formats.checkpoint.read import Checkpoint


class FloatModelView:
    """A checkpoint seen otherwise; what a subclass leaves alone is the source's.

    Attributes:
        source: The checkpoint, or another view of it.
    """

    def __init__(self, source: FloatModel) -> None:
        self.source = source

    @property
    def path(self) -> Path:
        """Folder of the checkpoint itself."""
        return self.source.path

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json of the model as it is seen."""
        return self.source.config

    @property
    def auxiliary_files(self) -> tuple[Path, ...]:
        """Tokenizer, generation and licence files."""
        return self.source.auxiliary_files

    def describe(self) -> Iterator[str]:
        """What was made of the checkpoint, for a person."""
        if isinstance(self.source, FloatModelView):
            yield from self.source.describe()

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return self.source.names()

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; nothing is read."""
        return self.source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a tensor; nothing is read."""
        return self.source.dtype(name)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor and transform it."""
        return self.source.tensor(name)


FloatModel: TypeAlias = Union["Checkpoint", FloatModelView]


def config_of(model: FloatModel) -> PretrainedConfig:
    """The model's configuration as transformers reads it."""
    from transformers import AutoConfig  # takes a second, and a recipe is read without it

    values = dict(model.config)
    kind = values.pop("model_type")
    make_known(kind)
    return AutoConfig.for_model(kind, **values)
