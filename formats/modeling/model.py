"""transformers' model on the meta device, its layers cut and named as its files have them.

Some families (Phi-3) compute q, k and v, or gate and up, by one layer. Here it is taken apart into
the layers that it stands for, side by side as before, so that methods see these in every family.
Where nothing is declared, only experts are taken apart, by what their files hold, and layers whose
weights lie as [in, out] become linear layers.

transformers renames tensors when it loads some models, and holds the experts of a block, which lie
one by one in the files, in two parameters. Its conversion is reversed here on the meta device, as
saving a model does: nothing is known of any family (`stored_names`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from formats.errors import CheckpointError
from formats.families.registry import find_family
from formats.families.sizes import merged_rows
from formats.modeling.adapters import adapted_model
from formats.modeling.experts import apart, split_experts
from formats.modeling.states import stack_convs
from formats.modeling.trace import is_stack
from formats.published import is_turned

GATED = ("gate_proj", "up_proj", "down_proj")  # layers of experts that files hold in one parameter


class SideBySide:
    """Linear layers that read one input, called as the one layer that they were.

    It is no module: the layers are registered with the module that held the one.

    Args:
        parts: The layers by their names there.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        self.parts = dict(parts)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to the layers' outputs side by side."""
        return torch.cat([part(x) for part in self.parts.values()], dim=-1)


def meta_model(config: PretrainedConfig, attention: str | None = None) -> nn.Module:
    """The model on the meta device: shapes only, its layers named and cut as in its files.

    Args:
        attention: transformers' name of the attention that it computes with; None for its own.
    """
    values = config.to_dict()
    family = find_family(values)
    if family is None:
        return found_model(config, attention)[0]
    model = built(config, attention)
    blocks = model.get_submodule("model.layers").children()
    rows = merged_rows(family, values) if family.stored_merged else {}
    for block in blocks:
        if family.mixture is not None:
            split_experts(block, family.mixture)
        for module, name in list(_merged(block, rows)):
            _split(module, name, rows[name])
    return model


@dataclass(frozen=True)
class TakenApart:
    """What the files of a model have in the place of what its code has.

    Attributes:
        stored: The name in the files of each tensor.
        stacks: `Structure.stacks`.
        listed: `Structure.listed`.
    """

    stored: dict[str, str]
    stacks: dict[str, tuple[str, ...]]
    listed: dict[str, tuple[str, ...]]


def found_model(config: PretrainedConfig, attention: str | None) -> tuple[Any, dict[str, str]]:
    """The model of a family without a declaration, and the stored names of its tensors.

    Raises:
        CheckpointError: its files hold tensors otherwise than its code, and are not read here.
    """
    model = built(config, attention)
    return model, take_apart(model).stored


def take_apart(model: Any) -> TakenApart:
    """Put linear layers in the place of other modules that are such.

    Args:
        model: Of a family without a declaration, from `built`.

    Raises:
        CheckpointError: its files hold tensors otherwise than its code, and are not read here.
    """
    _turn(model)
    found = TakenApart({}, {}, {})
    several: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, names in stored_names(model).items():
        if len(names) == 1:
            found.stored[name] = names[0]
        else:
            module, _, parameter = name.rpartition(".")
            several.setdefault(module, {})[parameter] = names
    for module, names in several.items():
        if isinstance(model.get_submodule(module), nn.Conv1d):
            found.stored.update(stack_convs(model, module, names["weight"]))
        else:
            _put_layers(model, module, names, found)
    for module, part in list(model.named_modules()):
        if is_stack(part) and (layers := apart(part, (*GATED[:2],), GATED[2])) is not None:
            own = [found.stored.pop(f"{module}.{name}") for name in ("gate_up_proj", "down_proj")]
            for parameter, leaves in zip(own, (GATED[:2], GATED[2:]), strict=True):
                found.stacks[parameter] = _rows(module, len(layers), leaves)
                found.stored.update({name: name for name in found.stacks[parameter]})
            model.set_submodule(module, layers)
    return found


def _rows(module: str, count: int, leaves: Sequence[str]) -> tuple[str, ...]:
    """Names of the weights in a parameter of all experts, in the order of its rows."""
    return tuple(f"{module}.{i}.{leaf}.weight" for i in range(count) for leaf in leaves)


def _turn(model: Any) -> None:
    """Put linear layers in the place of those that multiply by [in, out], as they are read here."""
    values = model.config.to_dict()
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, Conv1D) and is_turned(values, name):
                setattr(parent, name, nn.Linear(part.nx, part.nf, device="meta"))


def built(config: PretrainedConfig, attention: str | None) -> Any:
    """transformers' model on the meta device as it is; arguments as of `meta_model`."""
    options = {} if attention is None else {"attn_implementation": attention}
    own = copy.deepcopy(config)
    with torch.device("meta"):
        adapted = None if attention is None else adapted_model(own, attention)
        return adapted or AutoModelForCausalLM.from_config(own, **options)


def _put_layers(
    model: nn.Module, module: str, names: Mapping[str, tuple[str, ...]], found: TakenApart
) -> None:
    """Put experts' layers in the place of a stack.

    Args:
        model: On the meta device.
        module: Full name of the stack.
        names: Stored names of its parameters, those of all experts' gates before those of all ups.
        found: Gets the stored names of their weights.
    """
    stack = model.get_submodule(module)
    down = names.get("down_proj", ())
    first = "gate_up_proj" if "gate_up_proj" in names else "up_proj"
    both = names.get(first, ())
    groups = [[*both[i : i + len(down)]] for i in range(0, len(both), max(len(down), 1))]
    groups.append([*down])
    leaves = [_leaf(group[0]) for group in groups if group]
    layers = apart(stack, tuple(leaves[:-1]), leaves[-1]) if len(leaves) in (2, 3) else None
    if layers is None:
        raise CheckpointError(
            f"{type(stack).__name__}: not every expert is a gate, an up and a down projection; "
            "some may have no weights at all, which is not read here"
        )
    parent, _, own = module.rpartition(".")
    setattr(model.get_submodule(parent), own, layers)
    for parameter, part in ((first, groups[:-1]), ("down_proj", groups[-1:])):
        by_expert = zip(*part, strict=True)
        found.listed[f"{module}.{parameter}"] = tuple(name for row in by_expert for name in row)
    for leaf, group in zip(leaves, groups, strict=True):
        found.stored.update({f"{module}.{i}.{leaf}.weight": own for i, own in enumerate(group)})


def _leaf(tensor: str) -> str:
    """The layer's own name in that of its weight."""
    return tensor.removesuffix(".weight").rpartition(".")[2]


def _merged(block: nn.Module, names: Mapping[str, object]) -> Iterator[tuple[nn.Module, str]]:
    """The layers of a block that are to be taken apart: what holds each, and its name there."""
    for module in block.modules():
        for name, part in module.named_children():
            if name in names and isinstance(part, nn.Linear):
                yield module, name


def _split(module: nn.Module, name: str, rows: Mapping[str, int]) -> None:
    """Put several linear layers in the place of one; the module's code finds them by its name."""
    whole = module.get_submodule(name)
    assert isinstance(whole, nn.Linear)
    options = {"bias": whole.bias is not None, "device": "meta"}
    parts = {part: nn.Linear(whole.in_features, n, **options) for part, n in rows.items()}
    delattr(module, name)
    for part, linear in parts.items():
        module.add_module(part, linear)
    module.__dict__[name] = SideBySide(parts)


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
