"""What the launches of the kernels for many rows share."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from torch import Tensor

THREADS = 384  # of a program: two warpgroups multiply, and one warp of a third loads


def describe(tensor: Tensor, block: list[int]) -> Any:
    """A tensor for the TMA unit, in blocks; rows of 128 bytes are swizzled."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(128 if len(block) > 1 else 0, 8 * tensor.itemsize, len(block))
    return TensorDescriptor.from_tensor(tensor, block, layout)
