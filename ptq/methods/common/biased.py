"""A float model whose attention has biases, all zero: what shifting needs to be folded into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from formats.families.attention import LatentAttention
from formats.families.registry import attention_names, family_of
from formats.later import later
from ptq.methods.common.float_model import FloatModel, FloatModelView

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = later("torch")


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

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor: a bias is as long as its weight has rows."""
        added = self.added.get(name)
        return self.source.shape(name) if added is None else self.source.shape(added)[:1]

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a tensor: a bias has that of its weight."""
        return self.source.dtype(self.added.get(name, name))

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, or make the zeros."""
        if name in self.added:
            return torch.zeros(self.shape(name), dtype=self.dtype(name))
        return self.source.tensor(name)
