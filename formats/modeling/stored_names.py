"""Names that the tensors of transformers' code have in the files, by transformers' own conversion.

transformers renames tensors when it loads some models, and holds the experts of a block, which lie
one by one in the files, in two parameters. Its conversion is reversed here on the meta device, as
saving a model does: nothing is known of any family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from formats.errors import CheckpointError


def stored_names(model: Any) -> dict[str, tuple[str, ...]]:
    """Names in the files of each tensor of a model on the meta device, in transformers' order.

    A tensor that is stored as several has several names: a stack of experts has two for each
    expert, gate and up, or one.

    Raises:
        CheckpointError: a tensor is stored together with others, which is not read here.
    """
    state = model.state_dict()
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    conversions = [c for c in conversions if not isinstance(c, PrefixChange)]
    if not conversions:
        return {name: (name,) for name in state}
    model._weight_conversions = conversions
    together = revert_weight_conversion(model, dict(state))
    found = {name: tuple(_reverted(model, name, tensor)) for name, tensor in state.items()}
    apart = {stored for names in found.values() for stored in names}
    if apart != set(together):
        odd = min(apart ^ set(together))
        raise CheckpointError(
            f"{type(model).__name__}: {odd} is stored together with other tensors of its code, "
            "which is not read here. Declare its family, or convert the files"
        )
    return found


def _reverted(model: Any, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """What one tensor is stored as, on the meta device.

    Raises:
        CheckpointError: another shape is stored than the code has.
    """
    stored = revert_weight_conversion(model, {name: tensor})
    if len(stored) == 1 and next(iter(stored.values())).shape != tensor.shape:
        raise CheckpointError(
            f"{type(model).__name__}: {name} is stored in another shape than its code has, which "
            "is not read here. Declare its family, or convert the files"
        )
    return stored


def tied_names(model: Any) -> dict[str, str]:
    """Tensors of the code that are another one's, and need not be stored."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return dict(tied)


def renamed_modules(stored: Mapping[str, str]) -> dict[str, str]:
    """Names of modules in the files by those in the code.

    A module is named by a tensor of its own, or else by the first one below it.

    Args:
        stored: Name in the files of each tensor of the code, of all those of a model or block.
    """
    renamed: dict[str, str] = {}
    above: dict[str, str] = {}
    for tensor, own in stored.items():
        here, there, names = tensor, own, renamed
        while here and here.rpartition(".")[2] == there.rpartition(".")[2]:
            here, there = here.rpartition(".")[0], there.rpartition(".")[0]
            names.setdefault(here, there)
            names = above
    return {**above, **renamed}


def named_modules(model: nn.Module) -> dict[nn.Module, str]:
    """The name of each module in the code."""
    return {module: name for name, module in model.named_modules()}
