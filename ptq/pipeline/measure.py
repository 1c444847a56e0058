"""How much each linear layer and each cache lost, on calibration samples.

A layer whose input stays in float loses E[(e x)^2] = e H e^T for each row e of its weight's error:
where a method has asked for H = E[x x^T], that tells its error on all samples, and none run again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from formats.cache_scheme import CacheRole
from formats.scale_table import Role
from kernels.numerics import TYPES, fake_quantize
from ptq.methods.common.block import BlockWork, QuantizedLinear
from ptq.methods.common.events import Event
from ptq.methods.common.moments import output_errors
from ptq.plan.schedule import COMPARED
from ptq.result import ModuleRow

WORSE_DB = 0.1  # a layer noisier than its baseline by more is an event


CACHES: tuple[CacheRole, CacheRole] = ("k_cache", "v_cache")


Powers = Tensor  # fp64 [2], of a signal and of its error, where they were computed


class LayerPowers(NamedTuple):
    """Powers of what a layer has and of its errors: of its weight, inputs and outputs."""

    weight: list[Powers]
    input: list[Powers]
    output: list[Powers]

    @property
    def ratios(self) -> Ratios:
        """The ratios of each."""
        return Ratios(*map(_ratio_db, self))


class Ratios(NamedTuple):
    """Signal-to-quantization-noise ratios of a layer in dB; None where nothing was lost or seen."""

    weight: float | None
    input: float | None
    output: float | None


def measure(work: BlockWork, layers: Mapping[str, QuantizedLinear]) -> dict[str, Ratios]:
    """The ratios of `powers`; arguments as there."""
    return {name: found.ratios for name, found in powers(work, layers).items()}


def powers(work: BlockWork, layers: Mapping[str, QuantizedLinear]) -> dict[str, LayerPowers]:
    """Compare quantized layers with the block's float weights as they are now.

    The output of a layer is x W^T without its bias, and each layer is quantized alone: its input is
    that of the float block, whose products are not computed again.
    """
    linears = work.block.linears
    weights = {name: layer.dequantized() for name, layer in layers.items()}
    known = {n: _by_moments(work, n, weight) for n, weight in weights.items() if _suffices(work, n)}
    inputs: dict[str, list[Powers]] = {name: [] for name in layers}
    outputs = {name: [known[name]] if name in known else [] for name in layers}

    def compare(name: str, x: Tensor, y: Tensor) -> None:
        if name in layers and name not in known:
            seen, bias = work.seen_input(name, x, layers[name].input_scale), linears[name].bias
            inputs[name].append(_powers(x, seen))
            exact = y if bias is None else y - bias
            outputs[name].append(_powers(exact, F.linear(seen, weights[name])))

    block = work.block.begins(COMPARED if len(known) < len(layers) else 0)
    for index in range(len(block.inputs)):
        block.run(index, on_product=compare)
    return {
        name: LayerPowers(
            [_powers(linears[name].weight, weights[name])], inputs[name], outputs[name]
        )
        for name in layers
    }


def _suffices(work: BlockWork, name: str) -> bool:
    """Whether second moments tell all that a layer loses."""
    kept = work.seen.moments
    return kept is not None and kept.full and work.scheme_of(name).activations is None


def _by_moments(work: BlockWork, name: str, weight: Tensor) -> Powers:
    """Powers of a layer's mean output and of its error, for a quantized weight [out, in]."""
    exact, moments = work.block.linears[name].weight, work.second_moments(name)
    signal = ((exact @ moments) * exact).sum(dtype=torch.float64)
    return torch.stack((signal, output_errors(exact - weight, moments).sum().clamp(min=0)))


def module_rows(
    work: BlockWork, baseline: Mapping[str, Ratios], found: Mapping[str, Ratios]
) -> list[ModuleRow]:
    """The record's rows of solved layers; an event for each that is worse than rounded.

    Args:
        work: The block with its solved layers.
        baseline: What `measure` gave for round-to-nearest on the original block; empty where it
            was not measured.
        found: What it gives for the solved layers.
    """
    rows = []
    for name in work.quantized:
        ratios, linear = found[name], work.block.linears[name]
        before = baseline.get(name, Ratios(None, None, None))
        rows.append(module_row(name, (linear.out_features, linear.in_features), ratios, before))
        if _is_worse(ratios.output, before.output):
            was = "lossless" if before.output is None else f"{before.output:.1f} dB"
            message = (
                f"output SQNR {ratios.output:.1f} dB, {was} with round-to-nearest alone; the "
                "block's output as a whole decided"
            )
            work.events.append(Event(module=name, kind="worse_than_baseline", message=message))
    return rows


def module_row(name: str, shape: tuple[int, int], ratios: Ratios, before: Ratios) -> ModuleRow:
    """A layer's row of the record: what it lost, and what rounding alone would have."""
    return ModuleRow(
        module=name,
        shape=shape,
        weight_sqnr_db=ratios.weight,
        input_sqnr_db=ratios.input,
        output_sqnr_db=ratios.output,
        baseline_weight_sqnr_db=before.weight,
        baseline_output_sqnr_db=before.output,
    )


def _is_worse(output: float | None, before: float | None) -> bool:
    return output is not None and (before is None or output < before - WORSE_DB)


def cache_ratios(work: BlockWork, scales: Mapping[Role, Tensor]) -> dict[Role, float | None]:
    """Ratio of the noisiest head of K and of V with their static scales, in dB."""
    spec = work.scheme.kv_cache
    assert spec is not None
    powers: dict[tuple[Role, int], list[Powers]] = {}

    def compare(k: Tensor, v: Tensor) -> None:
        for role, x in zip(CACHES, (k, v), strict=True):  # [tokens, heads, head_dim]
            scale = scales[role].to(x.device)
            seen = fake_quantize(x, scale.view(1, len(scale), -1), TYPES[spec.dtype_of(role)])
            for head in range(x.shape[1]):
                pair = _powers(x[:, head], seen[:, head])
                powers.setdefault((role, head), []).append(pair)

    block = work.block.begins(COMPARED)
    for index in range(len(block.inputs)):
        block.run(index, on_kv=compare)
    ratios = {key: _ratio_db(pairs) for key, pairs in powers.items()}
    return {
        role: min(
            (r for (of, _), r in ratios.items() if of == role and r is not None), default=None
        )
        for role in scales
    }


def _powers(exact: Tensor, approximate: Tensor) -> Powers:
    """Sums of squares of a signal and of its error: rows in fp32, their sum in fp64."""
    return torch.stack((_power(exact), _power(exact - approximate)))


def _power(x: Tensor) -> Tensor:
    return x.square().sum(dim=-1).sum(dtype=torch.float64)


def _ratio_db(powers: list[Powers]) -> float | None:
    """10 log10(signal / noise): None where nothing was lost or seen, 0 dB where all was lost."""
    signal, noise = map(math.fsum, torch.stack([*powers]).T.tolist()) if powers else (0.0, 0.0)
    if noise == 0.0:
        return None
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else 0.0
