"""transformers' model with the linear layers that a family declares, whatever it is stored as.

Some families (Phi-3) compute q, k and v, or gate and up, by one layer. Here it is taken apart into
the layers that it stands for, side by side as before, so that methods see these in every family.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from calibrate.experts import split_experts
from formats.families.family import merged_rows
from formats.families.registry import find_family


class SideBySide:
    """Linear layers that read one input, called as the one layer that they were.

    It is no module: the layers are registered with the module that held the one.
    """

    def __init__(self, parts: Mapping[str, nn.Linear]) -> None:
        self._parts = tuple(parts.values())

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to the layers' outputs side by side."""
        return torch.cat([part(x) for part in self._parts], dim=-1)


def meta_model(config: PretrainedConfig, attention: str | None = None) -> nn.Module:
    """The model on the meta device: shapes only, its layers named and cut as in its declaration.

    Args:
        config: Its configuration; the model of a family without a declaration is left as it is.
        attention: transformers' name of the attention that it computes with; None for its own.
    """
    values = config.to_dict()
    family = find_family(values)
    options = {} if attention is None else {"attn_implementation": attention}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    if family is None:
        return model
    blocks = model.get_submodule("model.layers").children()
    rows = merged_rows(family, values) if family.stored_merged else {}
    for block in blocks:
        if family.mixture is not None:
            split_experts(block, family.mixture)
        for module, name in list(_merged(block, rows)):
            _split(module, name, rows[name])
    return model


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
