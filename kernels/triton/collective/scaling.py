"""The scales and bias that turn sums of integer products into floats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.triton.common import require


@dataclass(frozen=True)
class Scaling:
    """What makes floats of integer sums, as the GEMM of one GPU does.

    Attributes:
        x_scale: fp32, one element or [rows, 1], the same on all ranks.
        w_scale: fp32 [hidden].
        bias: fp32 [hidden], added once, or None.
    """

    x_scale: Tensor
    w_scale: Tensor
    bias: Tensor | None = None

    def check(self, rows: int, hidden: int) -> None:
        """Raise ValueError unless it is of so many rows and outputs."""
        found = self.x_scale.numel()
        require(found in (1, rows), f"{found} scales for {rows} rows of parts")
        for what, tensor in (("scales", self.w_scale), ("biases", self.bias)):
            shape = None if tensor is None else tuple(tensor.shape)
            require(shape in (None, (hidden,)), f"{what} of outputs are {shape}, not ({hidden},)")

    def of(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """int32 [rows, hidden] in a float type, rounded as `kernels.reference.int8_linear` does."""
        one = self.x_scale.numel() == 1
        x_scale = self.x_scale.reshape(()) if one else self.x_scale.reshape(-1, 1)
        y = sums.float() * (x_scale * self.w_scale)
        return (y if self.bias is None else y + self.bias).to(dtype)
