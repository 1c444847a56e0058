"""What quantizing has divided inputs and outputs of linear layers by, so that adapters can follow.

    quant/adapter_factors.safetensors   X.input_divisor [K] and X.output_divisor [N], fp32, of each
                                        linear layer X where they are not all 1; in the metadata
                                        `unmovable`: why adapters cannot follow, where they cannot

Smoothing (SmoothQuant, AWQ, K smoothing) lets a layer compute y / d_out of x / d_in, from weights
diag(1 / d_out) W diag(d_in). What an adapter adds, B A x, becomes diag(1 / d_out) B A diag(d_in) of
x / d_in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from formats.files import find_file
from formats.stored.folder import ADAPTER_FACTORS, INPUT_DIVISOR, OUTPUT_DIVISOR, UNMOVABLE
from formats.stored.safetensors_files import SafetensorsFile
from formats.stored.weights import check_scale


@dataclass(frozen=True)
class AdapterFactors:
    """Of a folder.

    Attributes:
        files: Where each factor is read from, by its full name.
        unmovable: Why adapters cannot follow; None where they can.
    """

    files: Mapping[str, SafetensorsFile] = field(default_factory=dict)
    unmovable: str | None = None

    def divisors(self, module: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """d_in [K] and d_out [N] of a linear layer [N, K], fp64.

        Raises:
            CheckpointError: one is of another shape, or not finite and positive.
        """
        outputs, inputs = shape
        divisor = self._read(f"{module}.{INPUT_DIVISOR}", inputs)
        return divisor, self.output_divisor(module, outputs)

    def output_divisor(self, module: str, outputs: int) -> Tensor:
        """d_out [N] alone; errors as in `divisors`."""
        return self._read(f"{module}.{OUTPUT_DIVISOR}", outputs)

    def _read(self, name: str, size: int) -> Tensor:
        if name not in self.files:
            return torch.ones(size, dtype=torch.float64)
        factors = self.files[name].tensor(name)
        check_scale(name, factors, ((size,),))
        return factors.double()


def read_factors(folder: Path) -> AdapterFactors:
    """What a checkpoint's folder says; of one that was not smoothed, nothing.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = find_file(folder, ADAPTER_FACTORS)
    if path is None:
        return AdapterFactors()
    file = SafetensorsFile(path)
    return AdapterFactors(dict.fromkeys(file.tensors, file), file.metadata.get(UNMOVABLE))


def factors_document(folder: Path) -> dict[str, bytes]:
    """The file by its path, for a folder that the same weights are written to; none without it."""
    path = find_file(folder, ADAPTER_FACTORS)
    return {} if path is None else {ADAPTER_FACTORS: path.read_bytes()}
