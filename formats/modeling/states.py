"""Modules of a model's code that keep a state from token to token beside K and V.

Such a mixer (a short convolution, a selective state space, a gated delta rule) has a convolution
over the last tokens, and its code keeps what the next token needs in a cache that it is handed.

The code of gated delta rules (Kimi Linear, OLMo Hybrid) puts the convolutions of q, k and v below
each other, which files hold one by one. How many rows each file's has, its own shape says:
transformers saves equal parts, published checkpoints those of the layers before, and both are the
same rows in the end.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from formats.errors import CheckpointError
from formats.families.block_layers import block_of

CACHES = ("cache_params", "past_key_values", "past_key_value")  # what code calls its cache
NARROW = 16  # a layer of a mixer with so many times fewer outputs than inputs steers it: float


def cache_argument(module: nn.Module) -> str | None:
    """Name under which a module's code takes a cache."""
    taken = inspect.signature(module.forward).parameters
    return next((name for name in CACHES if name in taken), None)


def find_mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that keep a state, by their full names in the code.

    Raises:
        LookupError: a convolution in a block belongs to no module that takes a cache; with its
            class's name.
    """
    found: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        block = block_of(f"{name}.weight")
        if not isinstance(part, nn.Conv1d) or block is None:
            continue
        inside = (own for own in _holders(name) if len(own) > len(block))
        holder = next((n for n in inside if cache_argument(model.get_submodule(n))), None)
        if holder is None:
            raise LookupError(type(model.get_submodule(name.rpartition(".")[0])).__name__)
        found[holder] = model.get_submodule(holder)
    return found


def narrow_linears(mixer: nn.Module) -> Iterator[nn.Linear]:
    """Linear layers of a mixer that stay in float: few outputs, each of which steers a head."""
    for part in mixer.modules():
        if isinstance(part, nn.Linear) and part.out_features * NARROW <= part.in_features:
            yield part


def _holders(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


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
