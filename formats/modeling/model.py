"""transformers' model on the meta device, its layers cut and named as its files have them.

Some families (Phi-3) compute q, k and v, or gate and up, by one layer. Here it is taken apart into
the layers that it stands for, side by side as before, so that methods see these in every family.
Where nothing is declared, only experts are taken apart, by what their files hold, and layers whose
weights lie as [in, out] become linear layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from formats.errors import CheckpointError
from formats.families.registry import find_family
from formats.families.sizes import merged_rows
from formats.modeling.adapters import adapted_model
from formats.modeling.experts import apart, split_experts
from formats.modeling.stored_names import stored_names
from formats.modeling.trace import is_stack
from formats.published.known import is_turned

GATED = ("gate_proj", "up_proj", "down_proj")  # layers of experts that files hold in one parameter


class SideBySide:
    """Linear layers that read one input, called as the one layer that they were.

    It is no module: the layers are registered with the module that held the one.

    Args:
        parts: The layers by their names there.

    Attributes:
        parts: The same.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        self.parts = dict(parts)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to the layers' outputs side by side."""
        return torch.cat([part(x) for part in self.parts.values()], dim=-1)


def meta_model(config: PretrainedConfig, attention: str | None = None) -> nn.Module:
    """The model on the meta device: shapes only, its layers named and cut as in its files.

    Args:
        config: Its configuration.
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


def found_model(
    config: PretrainedConfig, attention: str | None = None
) -> tuple[Any, dict[str, str]]:
    """The model of a family without a declaration, and the stored names of its tensors.

    Raises:
        CheckpointError: its files hold tensors otherwise than its code, and are not read here.
    """
    model = built(config, attention)
    return model, take_apart(model)[0]


def take_apart(model: Any) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Put linear layers in the place of other modules that are such.

    Args:
        model: Of a family without a declaration, from `built`.

    Returns:
        The name in the files of each tensor; and of each parameter in the files that holds all
        experts of a block, the names that their layers' weights get, in the order of its rows.

    Raises:
        CheckpointError: its files hold tensors otherwise than its code, and are not read here.
    """
    _turn(model)
    stored: dict[str, str] = {}
    stacks: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, names in stored_names(model).items():
        if len(names) == 1:
            stored[name] = names[0]
        else:
            module, _, parameter = name.rpartition(".")
            stacks.setdefault(module, {})[parameter] = names
    for module, names in stacks.items():
        stored |= _layers_for(model, module, names)
    held: dict[str, tuple[str, ...]] = {}
    for module, part in list(model.named_modules()):
        if is_stack(part) and (layers := apart(part, (*GATED[:2],), GATED[2])) is not None:
            own = [stored.pop(f"{module}.{name}") for name in ("gate_up_proj", "down_proj")]
            for parameter, leaves in zip(own, (GATED[:2], GATED[2:]), strict=True):
                held[parameter] = tuple(
                    f"{module}.{i}.{leaf}.weight" for i in range(len(layers)) for leaf in leaves
                )
                stored |= {name: name for name in held[parameter]}
            model.set_submodule(module, layers)
    return stored, held


def _turn(model: Any) -> None:
    """Put linear layers in the place of those that multiply by [in, out], as they are read here."""
    values = model.config.to_dict()
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, Conv1D) and is_turned(values, name):
                setattr(parent, name, nn.Linear(part.nx, part.nf, device="meta"))


def built(config: PretrainedConfig, attention: str | None = None) -> Any:
    """transformers' model on the meta device as it is; arguments as of `meta_model`."""
    options = {} if attention is None else {"attn_implementation": attention}
    own = copy.deepcopy(config)
    with torch.device("meta"):
        adapted = None if attention is None else adapted_model(own, attention)
        return adapted or AutoModelForCausalLM.from_config(own, **options)


def _layers_for(
    model: nn.Module, module: str, names: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """Put experts' layers in the place of a stack; the stored names of their weights.

    Args:
        model: On the meta device.
        module: Full name of the stack.
        names: Stored names of its parameters, those of all experts' gates before those of all ups.
    """
    stack = model.get_submodule(module)
    down = names.get("down_proj", ())
    both = names.get("gate_up_proj") or names.get("up_proj") or ()
    groups = [[*both[i : i + len(down)]] for i in range(0, len(both), max(len(down), 1))]
    groups.append([*down])
    leaves = [_leaf(group[0]) for group in groups if group]
    layers = apart(stack, tuple(leaves[:-1]), leaves[-1]) if len(leaves) in (2, 3) else None
    if layers is None:
        why = "its experts compute otherwise than by a gate, an up and a down projection"
        if isinstance(stack, nn.Conv1d):
            why = "the files hold one convolution of its code as several"
        raise CheckpointError(
            f"{type(stack).__name__}: {why}, which is not read here. Declare its family"
        )
    parent, _, own = module.rpartition(".")
    setattr(model.get_submodule(parent), own, layers)
    return {
        f"{module}.{i}.{leaf}.weight": stored
        for leaf, group in zip(leaves, groups, strict=True)
        for i, stored in enumerate(group)
    }


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
