"""Gives modules on the meta device their data: weights from files, buffers by their own code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from formats.errors import CheckpointError
from formats.modeling.states import StackedConv

Read = Callable[[str], Tensor]
FAULTS = (  # of others' code
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def materialize(
    module: nn.Module,
    read: Read,
    *,
    owner: Any,
    prefix: str = "",
    stored: Mapping[str, str] | None,
    skip: Collection[nn.Module] = (),
    device: torch.device | str,
    dtype: torch.dtype,
) -> None:
    """Load a module in place.

    Parameters and persistent buffers are read by name; each is freed from the file's type at once.
    What no file holds (a rotary embedding's frequencies, a factor of the embedding) is computed by
    the code of its model, as transformers does after it has built one on the meta device.

    Args:
        module: On the meta device; one of the modules of `owner`, or a copy of it.
        read: Gives a tensor of the files by its name.
        owner: The transformers model, whose code makes buffers.
        prefix: Full name of `module` in `owner`; "" for the model itself.
        stored: Name in the files of each tensor of the code, where the two differ
            (`Structure.stored`).
        skip: Modules that are left as they are, with all in them.
        dtype: Type of floating-point weights; integers keep their own.

    Raises:
        CheckpointError: a tensor has another shape than the code, or a weight is not finite.
    """
    left = {part for root in skip for part in root.modules()}
    for path, part in module.named_modules():
        if part not in left:
            name = ".".join(filter(None, (prefix, path)))
            load_own(part, name, read, owner=owner, stored=stored, device=device, dtype=dtype)


def load_own(
    part: nn.Module,
    name: str,
    read: Read,
    *,
    owner: Any,
    stored: Mapping[str, str] | None = None,
    device: torch.device | str,
    dtype: torch.dtype,
) -> None:
    """`materialize` for the tensors of one module alone, not of those in it."""
    renamed = stored or {}
    for leaf, tensor in (*part._parameters.items(), *part._buffers.items()):
        if tensor is None or leaf in part._non_persistent_buffers_set:
            continue
        own = f"{name}.{leaf}" if name else leaf
        own = renamed.get(own, own)
        value = read(own)
        if leaf in part._parameters:
            check_finite(own, value)
        rows = value if isinstance(part, StackedConv) else tensor  # as many as the file has
        check_shape(own, value, (*rows.shape[:1], *tensor.shape[1:]))
        value = value.to(device)  # narrow over the bus, wide there
        _put(part, leaf, value.to(dtype) if value.is_floating_point() else value)
    _make_buffers(part, name, owner, device)


def check_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Refuse a tensor of another shape than the model's code has.

    Raises:
        CheckpointError: it has.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise CheckpointError(
            f"{name}: found shape {tuple(tensor.shape)}; the model's configuration says "
            f"{tuple(shape)}. The checkpoint and its config.json do not belong together"
        )


def check_finite(name: str, weight: Tensor) -> Tensor:
    """The weight itself, where all of it is finite.

    Raises:
        CheckpointError: it holds NaN or infinity.
    """
    low, high = weight.aminmax()  # NaN wins over all that they meet
    if not bool(torch.isfinite(high - low)):
        bad = int((~torch.isfinite(weight)).sum())
        raise CheckpointError(
            f"{name} holds NaN or infinity, in {bad} of {weight.numel()} values. The model is "
            "damaged: get its weights again"
        )
    return weight


def _put(part: nn.Module, leaf: str, value: Tensor) -> None:
    if leaf in part._parameters:
        part._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        part._buffers[leaf] = value


def _make_by_holders(part: nn.Module, name: str, leaf: str, owner: Any) -> None:
    """Let modules that hold a module compute its buffer, where its own code has left it blank."""
    blank = part._buffers[leaf]
    if blank is None or not blank.is_floating_point() or not bool(blank.isnan().all()):
        return
    twin = owner.get_submodule(name)
    before, twin._buffers[leaf] = twin._buffers[leaf], blank
    while name and bool(blank.isnan().all()):
        name = name.rpartition(".")[0]
        owner._init_weights(owner.get_submodule(name))
    if twin is not part:
        twin._buffers[leaf] = before
    if bool(blank.isnan().all()):
        blank.zero_()


def _coder(owner: Any, name: str) -> Any:
    """The innermost of transformers' models that a module is in: its code makes the buffers."""
    holders = [owner]
    for leaf in filter(None, name.split(".")):
        holders.append(getattr(holders[-1], leaf, None))
    return [own for own in holders if isinstance(own, PreTrainedModel)][-1]


@torch.no_grad()
def _make_buffers(part: nn.Module, name: str, owner: Any, device: torch.device | str) -> None:
    """Compute the buffers of one module that are on the meta device still, by its model's code."""
    missing = {name: x for name, x in part._buffers.items() if x is not None and x.is_meta}
    if not missing:
        return
    for leaf, x in missing.items():
        blank = float("nan") if x.is_floating_point() else 0
        part._buffers[leaf] = torch.full_like(x, blank, device=device)
    loaded = [x for x in (*part._parameters.values(), *part._buffers.values()) if x is not None]
    fresh = {id(part._buffers[leaf]) for leaf in missing}
    for tensor in loaded:  # transformers leaves alone what is marked so
        tensor._is_hf_initialized = id(tensor) not in fresh  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with torch.device(device):
            _coder(owner, name)._init_weights(part)
            for leaf in missing:
                _make_by_holders(part, name, leaf, owner)
    except FAULTS as error:
        raise CheckpointError(
            f"{type(part).__name__}: the code of {type(owner).__name__} does not compute "
            f"{', '.join(missing)} ({type(error).__name__}: {error}), which no file holds; such a "
            "model is not run here"
        ) from error
