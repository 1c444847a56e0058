"""Modules of a model's code that keep a state from token to token beside K and V.

Such a mixer (a short convolution, a selective state space, a gated delta rule) has a convolution
over the last tokens, and its code keeps what the next token needs in a cache that it is handed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

from formats.families.names import block_of

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
