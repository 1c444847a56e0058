"""The float model that a run quantizes: a checkpoint as it is, or seen through a transform.

A transform that needs no data is a view of the checkpoint: it hands out other tensors, one at a
time, under the same interface. The driver, the methods and the report meet an ordinary model.

`BiasedCheckpoint` is one: attention has biases, all zero, which shifting is folded into.
`StoredLayers` is another: layers that are published in MXFP4 are seen as floats, and kept as they
are. Calibration computes with what they stand for, exactly; methods do not touch them, and the
checkpoint that is made gets their bytes. Whoever wants them quantized otherwise makes a float model
first (`ptq convert MODEL FLOAT --to float`), so that nobody rounds twice without saying so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from formats.families.family import LatentAttention
from formats.families.registry import attention_names, family_of
from formats.modeling.config import make_known, plain_values
from formats.namespace import later
from formats.scheme import LayerScheme

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from formats.checkpoint.read import Checkpoint
with later():
    import torch
    import transformers

    import kernels.numerics as numerics
    from formats.stored import weights as storage


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

    @property
    def left_out(self) -> tuple[str, ...]:
        """Full names of the layers that predict further tokens, where the view lacks them."""
        return self.source.left_out if isinstance(self.source, FloatModelView) else ()

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return self.source.names()

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def origin(self, name: str) -> str:
        """Name in the source of what a tensor is made of: its own, but where heads are untied."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; nothing is read."""
        return self.source.shape(self.origin(name))

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a tensor; nothing is read."""
        return self.source.dtype(self.origin(name))

    def tensor(self, name: str) -> Tensor:
        """Read one tensor and transform it."""
        return self.source.tensor(self.origin(name))


LEFT_OUT = "it predicts further tokens from the residual stream as it was before it was rotated"
FloatModel: TypeAlias = Union["Checkpoint", FloatModelView]


def config_of(model: FloatModel) -> PretrainedConfig:
    """The model's configuration as transformers reads it."""
    values = plain_values(model.config)
    kind = values.pop("model_type")
    make_known(kind)
    return transformers.AutoConfig.for_model(kind, **values)


def values_of(checkpoint: Checkpoint, module: str) -> Tensor:
    """A quantized layer's weight in fp32 [N, K]."""
    weight, spec = checkpoint.weight(module), checkpoint.scheme_of(module).weights
    assert spec is not None
    return numerics.dequantize(weight.q, weight.scale, weight.zero_point, spec.block)


class BiasedCheckpoint(FloatModelView):
    """A model whose q, k, v and o have biases; one that has them, or cannot, is left as it is."""

    def __init__(self, source: FloatModel) -> None:
        super().__init__(source)
        config, attention = source.config, family_of(source.config).attention
        # latent attention has no V of its own to be shifted
        self.setting = None if isinstance(attention, LatentAttention) else attention.bias_setting
        adds = self.setting is not None and not config.get(self.setting, False)
        self.added = {
            f"{module}.{layer}.bias": f"{module}.{layer}.weight"
            for module in (attention_names(config) if adds else ())
            for layer in attention.roles
        }

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's, with biases of attention where they were added."""
        return {**self.source.config, **({str(self.setting): True} if self.added else {})}

    def describe(self) -> Iterator[str]:
        """What was added."""
        yield from super().describe()
        if self.added:
            yield f"{self.setting}: true, for shift; adds {len(self.added)} biases of q, k, v and o"

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, the added among them."""
        return tuple(sorted({*self.source.names(), *self.added}))

    def origin(self, name: str) -> str:
        """Name in the source: a bias follows its weight."""
        return self.added.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor: a bias is as long as its weight has rows."""
        return super().shape(name)[:1] if name in self.added else super().shape(name)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, or make the zeros."""
        if name in self.added:
            return torch.zeros(self.shape(name), dtype=self.dtype(name))
        return self.source.tensor(name)


class StoredLayers(FloatModelView):
    """A checkpoint whose quantized layers are all in MXFP4, as a float model.

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
        return values_of(self._checkpoint, module)

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
