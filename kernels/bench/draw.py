"""Random numbers of linear layers and what they come to in fp64, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kernels.triton.reference as twins
from kernels.bench.shapes import SMALL_FLOATS, Gemm
from kernels.two_level import LARGEST

FP8 = torch.float8_e4m3fn
ELEMENTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1
UNIT = 2.0**-9


@dataclass(frozen=True)
class Numbers:
    """A weight as a checkpoint has it.

    Attributes:
        q: [N, K]: int8 (4 bits too, one a byte), e4m3, or the model's float type.
        scale: fp32 [N, groups], of fp8_block [N / 128, K / 128]; None of floats.
        zero_point: int8 [N, groups] or None.
        unit: What NVFP4's scales are e4m3 multiples of; None for others.
    """

    q: Tensor
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    unit: float | None = None

    def product(self, x: Tensor, x_scale: Tensor | None) -> Tensor:
        """x W^T in fp64: [M, N] of x [M, K] with its scale a row, a run of 128 inputs, or none."""
        if self.scale is None:
            return twins.float_linear(x, self.q)
        if len(self.scale) < len(self.q):
            assert x_scale is not None
            return twins.fp8_block_linear(x, x_scale, self.q, self.scale)
        return twins.grouped_linear(x, self.q, self.scale, None, x_scale, self.zero_point)


def draw_weight(shape: Gemm, device: torch.device | str) -> Numbers:
    """A random weight of a family."""
    size = shape.outputs, shape.inputs
    if shape.base == "w16a16":
        return Numbers(torch.randn(size, device=device, dtype=getattr(torch, shape.dtype)))
    if shape.base.startswith("fp8"):
        blocks = (-(-shape.outputs // 128), -(-shape.inputs // 128))
        scales = blocks if shape.base == "fp8_block" else (shape.outputs, 1)
        return Numbers(torch.randn(size, device=device).to(FP8), _scales(scales, device))
    if shape.base == "w8a8":
        return Numbers(integers(size, 8, device), _scales((shape.outputs, 1), device))
    if shape.base in SMALL_FLOATS:
        return fp4_weight(shape, device)
    zeros = shape.family.endswith("_zeros")
    q, scale, zero_point = grouped_weight(int(shape.family[1]), *size, shape.group, zeros, device)
    if "two_level" in shape.family:
        scale = two_level_scale(shape.outputs, scale.shape[1], device)
    return Numbers(q, scale, zero_point)


def grouped_weight(
    bits: int, outputs: int, inputs: int, group: int, zeros: bool,
    device: torch.device | str = "cuda",
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Random integers [N, K] of some bits, scales [N, groups], and zero points or None."""
    groups = (outputs, inputs // group)
    zero_point = integers(groups, bits, device) if zeros else None
    return integers((outputs, inputs), bits, device), _scales(groups, device), zero_point


def fp4_weight(shape: Gemm, device: torch.device | str) -> Numbers:
    """Random e2m1 elements [N, K] and scales: e4m3 multiples of a unit, or powers of two."""
    size, groups = (shape.outputs, shape.inputs), (shape.outputs, shape.inputs // shape.group)
    half = torch.tensor(ELEMENTS, device=device)
    values = torch.cat((half, -half)).to(FP8).view(torch.uint8)
    q = values[torch.randint(0, 16, size, device=device)].view(FP8)
    if shape.group == 32:
        return Numbers(q, torch.exp2(torch.randint(-9, -5, groups, device=device).float()))
    multiples = torch.randint(0x30, 0x50, groups, dtype=torch.uint8, device=device)
    return Numbers(q, multiples.view(FP8).float() * UNIT, unit=UNIT)


def integers(size: tuple[int, ...], bits: int, device: torch.device | str) -> Tensor:
    """Random int8 of 4 bits, -8 to 7, or of 8, -127 to 127."""
    low, high = (-8, 8) if bits == 4 else (-127, 128)
    return torch.randint(low, high, size, dtype=torch.int8, device=device)


def _scales(size: tuple[int, int], device: torch.device | str) -> Tensor:
    return torch.rand(size, device=device) * 0.01 + 0.002


def two_level_scale(outputs: int, groups: int, device: torch.device | str = "cuda") -> Tensor:
    """Random scales [outputs, groups] of two levels; the first two multiples are coprime."""
    multiple = torch.randint(1, LARGEST + 1, (outputs, groups), device=device).float()
    multiple[:, :1], multiple[:, 1:2] = LARGEST - 1, LARGEST
    unit = torch.randint(8, 16, (outputs, 1), device=device) * 2.0**-14
    return unit * multiple


def draw_rows(shape: Gemm, device: torch.device | str) -> tuple[Tensor, Tensor | None]:
    """Random inputs [M, K] of a family and their scales [M, 1]; None of those in floats."""
    size = (shape.rows, shape.inputs)
    if "a16" in shape.family:
        return torch.randn(size, device=device, dtype=getattr(torch, shape.dtype)), None
    own = torch.rand(shape.rows, 1, device=device) * 0.01
    if shape.family.startswith("fp8"):
        return torch.randn(size, device=device).to(FP8), own
    return integers(size, 8, device), own


def relative(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; NaN if anything is NaN."""
    wanted = wanted.double()
    return ((found.double() - wanted).norm() / wanted.norm()).item()
