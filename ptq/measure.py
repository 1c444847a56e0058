"""How much each linear layer lost: its weight, and its output on calibration samples."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from ptq.methods.base import BlockWork, QuantizedLinear
from ptq.result import Event, ModuleRow

SAMPLES = 4  # sequences that outputs are compared on
WORSE_DB = 0.1  # a layer noisier than its baseline by more is an event

Ratios = dict[str, tuple[float | None, float | None]]  # by layer: (weight, output) in dB


def measure(work: BlockWork, layers: Mapping[str, QuantizedLinear]) -> Ratios:
    """Compare quantized layers with the block's float weights as they are now.

    The output of a layer is x W^T without its bias, and each layer is quantized alone: its input is
    that of the float block.

    Returns:
        Signal-to-quantization-noise ratios of weight and output in dB, None for lossless.
    """
    weights = {name: layer.dequantized() for name, layer in layers.items()}
    powers: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}

    def compare(name: str, x: Tensor) -> None:
        if name in layers:
            exact = F.linear(x, work.block.linears[name].weight)
            seen = work.seen_input(x, layers[name].input_scale)
            powers[name].append(_powers(exact, F.linear(seen, weights[name])))

    for sample in work.samples(SAMPLES) if layers else ():
        work.block.run(sample, on_input=compare)
    return {
        name: (
            _ratio_db([_powers(work.block.linears[name].weight, weights[name])]),
            _ratio_db(powers[name]),
        )
        for name in layers
    }


def module_rows(work: BlockWork, baseline: Ratios) -> list[ModuleRow]:
    """Measure what the methods handed over; layers that came out worse than the baseline are told.

    Args:
        work: The block with its solved layers.
        baseline: What `measure` gave for round-to-nearest on the block as it came.
    """
    rows = []
    for name, (weight, output) in measure(work, work.quantized).items():
        linear, (before_weight, before_output) = work.block.linears[name], baseline[name]
        rows.append(
            ModuleRow(
                module=name,
                shape=(linear.out_features, linear.in_features),
                weight_sqnr_db=weight,
                output_sqnr_db=output,
                baseline_weight_sqnr_db=before_weight,
                baseline_output_sqnr_db=before_output,
            )
        )
        if output is not None and (before_output is None or output < before_output - WORSE_DB):
            before = "lossless" if before_output is None else f"{before_output:.1f} dB"
            message = (
                f"output SQNR {output:.1f} dB, {before} with round-to-nearest alone; the "
                "block's output as a whole decided"
            )
            work.events.append(Event(module=name, kind="worse_than_baseline", message=message))
    return rows


def _powers(exact: Tensor, approximate: Tensor) -> tuple[float, float]:
    """Sums of squares of a signal and of its error, in fp64."""
    signal = exact.double()
    return signal.square().sum().item(), (signal - approximate.double()).square().sum().item()


def _ratio_db(powers: list[tuple[float, float]]) -> float | None:
    """10 log10(signal / noise): None where nothing was lost, 0 dB where there was no signal."""
    signal, noise = (math.fsum(column) for column in zip(*powers, strict=True))
    if noise == 0.0:
        return None
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else 0.0
