"""Linear layers inside transformers' code: modules in the place of `nn.Linear`, run by a backend.

Layers that read one tensor run as one: the first that is called with it computes them all, and the
others take their part when they are called with the same tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from inference.models.layers import LinearLayer
from inference.transformers_code.attention import current_sinks, current_step


class BackendLinear(nn.Module):
    """A linear layer of a backend.

    Args:
        layer: Runs it.
    """

    def __init__(self, layer: LinearLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs] of the same type."""
        y = self.layer(x.reshape(-1, x.shape[-1]), current_sinks())
        return y.view(*x.shape[:-1], -1)


class SharedInput:
    """Layers that read one tensor, computed together.

    Args:
        layer: All of them as one, their outputs side by side.
        outputs: Numbers of an output of each.

    Attributes:
        layer: All of them as one.
        outputs: Numbers of an output of each.
    """

    def __init__(self, layer: LinearLayer, outputs: Sequence[int]) -> None:
        self.layer, self.outputs = layer, list(outputs)
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def part(self, index: int, x: Tensor) -> Tensor:
        """The outputs of one of them for x [..., inputs]; each is told once for a tensor."""
        if x is not self._input or index not in self._parts:
            y = self.layer(x.reshape(-1, x.shape[-1]), current_sinks()).view(*x.shape[:-1], -1)
            self._input, self._parts = x, dict(enumerate(y.split(self.outputs, dim=-1)))
        own = self._parts.pop(index)
        if not self._parts:
            self._input = None  # nothing of a step is held after it
        return own


class PartOfLinear(nn.Module):
    """One of several layers that read one tensor.

    Args:
        shared: Computes all of them.
        index: Which of them this is.
    """

    def __init__(self, shared: SharedInput, index: int) -> None:
        super().__init__()
        self.shared, self._index = shared, index

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs] of the same type."""
        return self.shared.part(self._index, x)


class Embedding(nn.Module):
    """The embedding of tokens, held in the type that it is stored in.

    Args:
        weight: [vocabulary, hidden].
        dtype: Of activations.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[..., hidden] of token ids [...]."""
        return self.weight[ids].to(self._dtype)


class HeadRows(nn.Module):
    """The embedding of tokens, where a quantized head is the embedding, too.

    Args:
        head: Runs the head.
        dtype: Of activations.
    """

    def __init__(self, head: LinearLayer, dtype: torch.dtype) -> None:
        super().__init__()
        self._head, self._dtype = head, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[..., hidden] of token ids [...]."""
        return self._head.gather(ids.flatten(), self._dtype).view(*ids.shape, -1)


class Head(nn.Module):
    """The layer that gives logits, of those tokens of a step whose logits are wanted.

    What transformers' code does with logits behind it (a factor, a bound) it does with these.

    Args:
        layer: Runs it.
    """

    def __init__(self, layer: LinearLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, hidden] to logits fp32 [1, R, vocabulary]."""
        rows = current_step().rows
        x = x[0] if rows is None else x[0].index_select(0, rows)
        return self.layer(x).float()[None]
