"""A model that is published with layers in MXFP4: seen as floats, these layers kept as they are.

Calibration computes with what the layers stand for, exactly; methods do not touch them, and the
checkpoint that is made gets their bytes. Whoever wants them quantized otherwise makes a float model
first (`ptq convert MODEL FLOAT --to float`), so that nobody rounds twice without saying so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from formats.namespace import later
from formats.scheme import LayerScheme
from ptq.methods.common.float_model import FloatModel, FloatModelView

if TYPE_CHECKING:
    from torch import Tensor

    from formats.checkpoint.read import Checkpoint
with later():
    import torch

    from formats.stored import weights as storage


class StoredLayers(FloatModelView):
    """A checkpoint whose quantized layers are all in MXFP4, as a float model.

    Args:
        source: The checkpoint.

    Attributes:
        kept: The schemes of those layers by full name.
    """

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        self._checkpoint = source
        self.kept = {name: source.scheme_of(name) for name in source.quantized_modules}
        self._weights = {f"{name}.weight": name for name in self.kept}

    @cached_property
    def _names(self) -> tuple[str, ...]:
        own = {
            f"{name}.{leaf}" for name, s in self.kept.items() for leaf in storage.needed_leaves(s)
        }
        return tuple(sorted({*self.source.names()} - own | self._weights.keys()))

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return self._names

    def __contains__(self, name: str) -> bool:
        return name in self._weights or name in self.source

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        module = self._weights.get(name)
        return self.source.shape(name) if module is None else self._checkpoint.weight_shape(module)

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a tensor; of a kept layer's weight the one that holds it exactly."""
        return torch.bfloat16 if name in self._weights else self.source.dtype(name)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor; of a kept layer what it stands for, in fp32."""
        module = self._weights.get(name)
        if module is None:
            return self.source.tensor(name)
        weight = self._checkpoint.weight(module)
        groups = weight.q.float().unflatten(1, (weight.scale.shape[1], -1))
        return (groups * weight.scale[..., None]).flatten(1)

    def as_stored(self, module: str) -> dict[str, Tensor]:
        """The tensors that a kept layer's weight is stored as."""
        names = (f"{module}.{leaf}" for leaf in sorted(storage.needed_leaves(self.kept[module])))
        return {name: self.source.tensor(name) for name in names}


def seen_as_floats(checkpoint: Checkpoint) -> FloatModel:
    """A checkpoint as a float model, if it has layers that are kept; else itself."""
    schemes = [checkpoint.scheme_of(name) for name in checkpoint.quantized_modules]
    if not schemes or any(storage.storage_format(scheme) != storage.MXFP4 for scheme in schemes):
        return checkpoint
    return StoredLayers(checkpoint)


def _base(model: FloatModel) -> StoredLayers | None:
    while isinstance(model, FloatModelView):
        if isinstance(model, StoredLayers):
            return model
        model = model.source
    return None


def kept_layers(model: FloatModel) -> Mapping[str, LayerScheme]:
    """The schemes of the layers that a model keeps as they are stored, by full name."""
    base = _base(model)
    return {} if base is None else base.kept


def stored_tensors(model: FloatModel, name: str) -> dict[str, Tensor]:
    """What a checkpoint gets for a tensor of a model that no method has changed."""
    base, (module, _, leaf) = _base(model), name.rpartition(".")
    if base is None or leaf != "weight" or module not in base.kept:
        return {name: model.tensor(name)}
    return base.as_stored(module)
