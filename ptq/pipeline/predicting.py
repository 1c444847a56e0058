"""Layers that predict further tokens, rounded to the nearest: no sample runs through them.

What drafts costs no accuracy, only drafts that are not accepted, so that these layers are solved by
their weights alone, whatever methods the recipe has: scales by absmax, of less than 8 bits by the
search for the least squared error. Inputs are scaled when they arrive. What is lost of a weight
stands beside its scales; the layers in the record are those whose outputs are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from calibrate.block import DecoderBlock
from calibrate.handed import Handed
from formats.modeling.load import check_finite
from ptq.methods.common.block import BlockSettings, BlockWork
from ptq.methods.common.float_model import FloatModel
from ptq.methods.common.rounding import round_to_nearest
from ptq.pipeline.emit import layer_tensors, linear_entries
from ptq.pipeline.measure import measure, module_rows
from ptq.pipeline.resume import BlockRecord, SolvedBlock
from ptq.plan.plan import Plan

ABSMAX_BITS = 8  # from which on scales need no search


def solve_predicting(
    plan: Plan, model: FloatModel, device: torch.device
) -> Iterator[tuple[str, SolvedBlock]]:
    """Round the linear layers of a plan's model that are in such layers.

    Args:
        model: As the recipe's methods see it.
        device: Where they are rounded.

    Yields:
        Layers that are merged at run time together, and every other one alone: a name, and what
        the checkpoint gets.

    Raises:
        CheckpointError: a weight holds NaN or infinity.
    """
    merged: dict[str, list[str]] = {}
    of = {module.name: module.fused_group or module.name for module in plan.modules}
    for name in plan.predicting:
        merged.setdefault(of[name], []).append(name)
    for group, names in merged.items():
        read = ((name, check_finite(name, model.tensor(f"{name}.weight"))) for name in names)
        weights = {name: weight.to(device).float() for name, weight in read}
        work = _work(plan, model, group, weights, device)
        spec = work.weight_spec(names[0])
        work.quantized = round_to_nearest(work, "mse" if spec.bits < ABSMAX_BITS else "absmax")
        rows = module_rows(work, {}, measure(work, work.quantized))
        layers = layer_tensors(model, work).items()
        tensors = {f"{n}.{leaf}": tensor for n, own in layers for leaf, tensor in own.items()}
        record = BlockRecord(entries=tuple(linear_entries(work, rows)))
        yield group, SolvedBlock(tensors, record=record)


def _work(
    plan: Plan,
    model: FloatModel,
    group: str,
    weights: Mapping[str, Tensor],
    device: torch.device,
) -> BlockWork:
    """Layers as a block that no sample runs through."""
    module, names = nn.Module(), {"": group}
    for index, (name, weight) in enumerate(weights.items()):
        linear = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        module.add_module(str(index), linear)
        names[str(index)] = name
    schemes = plan.schemes
    return BlockWork(
        block=DecoderBlock(group, None, None, module, [], Handed(), device=device, names=names),
        settings=BlockSettings(plan.recipe.observers.input, dict.fromkeys(weights, group)),
        dtype_of=model.dtype,
        scheme=plan.recipe.scheme,
        schemes={name: schemes[name] for name in weights},
        targets=tuple(weights),
    )
