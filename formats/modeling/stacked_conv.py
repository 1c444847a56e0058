"""Convolutions over the last tokens that a model's code has as one, and its files one by one.

The code of gated delta rules (Kimi Linear, OLMo Hybrid) puts those of q, k and v below each other.
How many rows each file's has, its own shape says: transformers saves equal parts, published
checkpoints those of the layers before, and both are the same rows in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from formats.errors import CheckpointError


class StackedConv(nn.Module):
    """In the place of the code's convolution, which looks at its weight and does not call it.

    Args:
        whole: The code's, on the meta device.
        names: Of those of the files, in the order of its rows.

    Attributes:
        bias: None.
    """

    bias = None

    def __init__(self, whole: nn.Conv1d, names: Sequence[str]) -> None:
        super().__init__()
        self._names, self._rows = tuple(names), len(whole.weight)
        for name, part in zip(names, whole.weight.tensor_split(len(names)), strict=True):
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    @property
    def weight(self) -> Tensor:
        """[channels, 1, width], the rows of all of them.

        Raises:
            CheckpointError: they are more or fewer than the code's.
        """
        found = torch.cat([self.get_parameter(name) for name in self._names])
        if len(found) != self._rows:
            raise CheckpointError(
                f"{', '.join(self._names)}: found {len(found)} rows in all; config.json says "
                f"{self._rows}. The checkpoint and its config.json do not belong together"
            )
        return found


def stack_convs(model: Any, module: str, stored: Sequence[str]) -> dict[str, str]:
    """Put what files have in the place of one convolution; the stored name of each parameter.

    Args:
        model: On the meta device.
        module: Full name of the convolution.
        stored: Names of the files' weights, in the order of its rows.

    Raises:
        CheckpointError: it has a bias.
    """
    whole = model.get_submodule(module)
    if whole.bias is not None:
        raise CheckpointError(
            f"{module}: the files hold this convolution as several, and it has a bias, which is "
            "not read here. Declare its family"
        )
    leaves = [name.removesuffix(".weight").rpartition(".")[2] for name in stored]
    model.set_submodule(module, StackedConv(whole, leaves))
    return {f"{module}.{leaf}": name for leaf, name in zip(leaves, stored, strict=True)}
