"""Second moments of the inputs of a block's linear layers: GPTQ's Hessian, and importance.

H = E[x x^T] over the tokens of all samples, fp32 [in, in]. The driver runs one sample at a time, in
an order set by their content, so the sum does not depend on how the data set is shuffled or padded.
Neighbours are summed by themselves and these sums in their order (`merge`), so that it does not
depend on the number of devices, either. Layers that share an input share one H. As it is symmetric,
only the bands of rows below its diagonal, each with its block of the diagonal, are multiplied:
little more than half of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from calibrate.transfers import add_beside, wait_for_sums, zeros_for

BAND = 2048  # columns of a Hessian that are held in fp64 at once to weight errors


def row_bands(width: int) -> list[slice]:
    """Rows of a [width, width] matrix in bands: eight, or fewer of 128 rows at least."""
    size = max(128, -(-width // 8))
    return [slice(start, min(start + size, width)) for start in range(0, width, size)]


class Moments:
    """Accumulates E[x x^T], or only its diagonal, of the inputs of linear layers.

    Args:
        stand_in: For each layer the one whose input is taken for its own.
        full: Whether all of E[x x^T] is kept, not only its diagonal.
    """

    def __init__(self, stand_in: Mapping[str, str], layers: Iterable[str], *, full: bool) -> None:
        self.full = full
        self._devices: Mapping[str, torch.device] = {}
        self._stand_in = stand_in
        self._wanted = {stand_in[name] for name in layers}
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._halves: set[str] = set()  # of sums whose blocks above the diagonal are not filled in

    def add(self, name: str, x: Tensor, tokens: int | None = None) -> None:
        """Add the input [tokens, in] of a layer; of layers that share it, the first counts.

        Args:
            tokens: How many it stands for, where rows of zeros were left out.
        """
        if name not in self._wanted:
            return
        x = x.float()
        if name not in self._sums:
            width = x.shape[1]
            self._sums[name] = x.new_zeros((width, width) if self.full else (width,))
        if self.full:
            self._halves.add(name)
            for rows in row_bands(x.shape[1]):
                self._sums[name][rows, : rows.stop].addmm_(x[:, rows].T, x[:, : rows.stop])
        else:
            self._sums[name].add_(x.square().sum(dim=0))
        self._tokens[name] = self._tokens.get(name, 0) + (len(x) if tokens is None else tokens)

    def part(self) -> Moments:
        """Nothing of the same, for `merge`."""
        return Moments(self._stand_in, self._wanted, full=self.full)

    def place(self, devices: Mapping[str, torch.device]) -> None:
        """Say where sums of several devices are kept, by the layers that stand for others."""
        self._devices = devices

    def merge(self, part: Moments) -> None:
        """Add what some more samples have shown; the part is empty afterwards."""
        for name, tokens in part._tokens.items():
            own = part._sums[name]
            if name not in self._sums:
                self._sums[name] = zeros_for(own, self._devices.get(name))
            if name in self._devices:
                add_beside(self._sums[name], own)
            else:
                self._sums[name].add_(own)
            own.zero_()
            self._tokens[name] = self._tokens.get(name, 0) + tokens
        self._halves |= part._halves
        part._tokens.clear()
        part._halves.clear()

    def complete(self) -> None:
        """Nothing more will come: from now on several threads may read."""
        for name, total in self._sums.items():
            if name in self._devices:
                wait_for_sums(total)
            self._complete(name)

    def of(self, name: str) -> Tensor:
        """E[x x^T] of a layer's input [in, in], or its diagonal [in]."""
        stand_in = self._stand_in[name]
        self._complete(stand_in)
        return self._sums[stand_in] / self._tokens[stand_in]

    def _complete(self, name: str) -> None:
        """Fill in what is above the diagonal."""
        if name in self._halves:
            self._halves.remove(name)
            total = self._sums[name]
            for rows in row_bands(len(total)):
                total[: rows.start, rows] = total[rows, : rows.start].T

    def state(self) -> dict[str, Tensor]:
        """Tensors to save: `<layer>/sum` and `<layer>/tokens`."""
        for name in self._sums:
            self._complete(name)
        return {f"{name}/sum": total for name, total in self._sums.items()} | {
            f"{name}/tokens": torch.tensor([tokens]) for name, tokens in self._tokens.items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave.

        Raises:
            KeyError: a wanted layer is missing.
        """
        self._sums = {name: state[f"{name}/sum"] for name in self._wanted}
        self._tokens = {name: int(state[f"{name}/tokens"].item()) for name in self._wanted}


def output_errors(error: Tensor, hessian: Tensor) -> Tensor:
    """e H e^T of each row of a weight's error [N, K]: fp64 [N].

    On a GPU products are of fp32, in TF32: no term is negative, so that the sum errs as little.
    """
    dtype = error.dtype if error.is_cuda else torch.float64
    wide, found = error.to(dtype), torch.zeros(len(error), dtype=torch.float64, device=error.device)
    for start in range(0, wide.shape[1], BAND):
        columns = slice(start, start + BAND)
        carried = (wide @ hessian[:, columns].to(dtype)).mul_(wide[:, columns])
        found += carried.sum(dim=1, dtype=torch.float64)
    return found
