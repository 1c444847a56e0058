"""A float model whose attention has biases, all zero: what shifting needs to be folded into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ptq.methods.common.float_model import FloatModel, FloatModelView
from ptq.methods.common.later import torch

if TYPE_CHECKING:
    from torch import Tensor

FAMILIES = ("llama", "qwen3")  # whose configuration has `attention_bias`, for q, k, v and o alike
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")


class BiasedCheckpoint(FloatModelView):
    """A model with `attention_bias: true`; one that has it, or cannot, is left as it is."""

    def __init__(self, source: FloatModel) -> None:
        super().__init__(source)
        config = source.config
        adds = config["model_type"] in FAMILIES and not config.get("attention_bias", False)
        blocks = range(int(config["num_hidden_layers"]) if adds else 0)
        self.added = {
            f"model.layers.{i}.self_attn.{layer}.bias": f"model.layers.{i}.self_attn.{layer}.weight"
            for i in blocks
            for layer in LAYERS
        }

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's, with biases of attention where they were added."""
        return {**self.source.config, **({"attention_bias": True} if self.added else {})}

    def describe(self) -> Iterator[str]:
        """What was added."""
        yield from super().describe()
        if self.added:
            yield f"attention_bias: true, for shift; adds {len(self.added)} biases of q, k, v and o"

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
