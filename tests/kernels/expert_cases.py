"""Weights of experts for tests of sorted rows: by the family of their kernel, one behind the other."""

from dataclasses import fields, replace

import torch

from kernels.triton.linear.fp4 import pack_fp4
from kernels.triton.linear.fp8_block import pack_fp8_block
from kernels.triton.linear.w4a8 import pack_w4a8
from kernels.triton.linear.w8a8 import pack_w8a8
from kernels.triton.linear.w16a16 import DenseWeight
from kernels.triton.linear.weight_only import pack_w4a16, pack_w8a16

FP8 = torch.float8_e4m3fn
POSITIVE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat((POSITIVE, -POSITIVE))  # by code
FAMILIES = (
    "w4a16_zeros", "w8a16", "w8a16_whole", "w4a8", "w4a8_two_level", "w4a8_whole", "w8a8", "fp8",
    "fp8_block", "w16a16", "mxfp4",
)  # fmt: skip
EXACT = ("w8a8", "w4a8_two_level", "w4a8_whole")  # sums of integers


def make_weights(
    family: str, experts: int, outputs: int, inputs: int, rows: torch.dtype = torch.float16
) -> tuple[list, list]:
    """Random weights of experts: (packed, views of one tensor a field as an engine has them; plain).

    A plain one is what a layer does to rows of fp64, by torch alone. `rows` is the type of the rows
    that MXFP4 is packed for.
    """
    made = [_weight(family, outputs, inputs, rows) for _ in range(experts)]
    own, plain = [weight for weight, _ in made], [function for _, function in made]
    held = {}
    for field in fields(own[0]):
        if isinstance(getattr(own[0], field.name), torch.Tensor):
            held[field.name] = torch.stack([getattr(weight, field.name) for weight in own])
    packed = [
        replace(weight, **{name: t[e] for name, t in held.items()}) for e, weight in enumerate(own)
    ]
    return packed, plain


def _weight(family: str, outputs: int, inputs: int, rows: torch.dtype):
    if family == "mxfp4":
        return _mxfp4_weight(outputs, inputs, rows)
    base, _, kind = family.partition("_")
    bias = torch.randn(outputs)
    low, high = (-8, 8) if base.startswith("w4") else (-127, 128)
    q = torch.randint(low, high, (outputs, inputs), dtype=torch.int8)
    groups = 1 if kind == "whole" or base in ("w8a8", "fp8") else inputs // 64
    scale = torch.rand(outputs, groups) * 0.01 + 0.005
    zeros = torch.randint(-8, 8, scale.shape, dtype=torch.int8) if kind == "zeros" else None
    if kind == "two_level":
        scale = torch.randint(1, 17, scale.shape) * 2.0**-10
    stored = q.to(FP8) if base == "fp8" else q
    if family == "w16a16":
        stored, scale, bias = (q.float() / 100).half(), torch.ones(1, 1), bias.half()
        weight = DenseWeight(stored, bias)
    elif family == "fp8_block":
        blocks = torch.rand(-(-outputs // 128), inputs // 128)
        scale = blocks.repeat_interleave(128, 0)[:outputs]
        weight = pack_fp8_block(stored, blocks, bias)
    elif base in ("w8a8", "fp8"):
        weight = pack_w8a8(stored, scale[:, 0], bias)
    else:
        make = {"w4a16": pack_w4a16, "w8a16": pack_w8a16, "w4a8": pack_w4a8}[base]
        weight = make(q, scale, bias, zeros)
    each = inputs // scale.shape[1]
    values = stored.double()
    if zeros is not None:
        values = values - zeros.double().repeat_interleave(each, 1)
    values = values * scale.double().repeat_interleave(each, 1)
    return weight, lambda x: x @ values.T + bias.double()


def _mxfp4_weight(outputs: int, inputs: int, rows: torch.dtype):
    bias, codes = torch.randn(outputs), torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scale = 2.0 ** torch.randint(-9, -3, (outputs, inputs // 32))
    values = E2M1.to(codes.device)[codes.int()] * scale.repeat_interleave(32, 1)
    return pack_fp4(codes, scale, bias, rows), lambda x: x @ values.double().T + bias.double()


def plain_rows(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Rows of `make_rows` in fp64."""
    if scales is None:
        return x.double()
    return x.double() * scales.double().repeat_interleave(x.shape[1] // scales.shape[1], 1)


def make_rows(family: str, rows: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows as a family's kernel takes them, and their scales."""
    x = torch.randint(-100, 101, (rows, inputs), dtype=torch.int8)
    if family.startswith("fp8"):
        runs = inputs // 128 if family == "fp8_block" else 1
        return (x.float() / 30).to(FP8), torch.rand(rows, runs) + 0.1
    if "a8" in family:
        return x, torch.rand(rows, 1) + 0.1
    return (x.float() / 50).half(), None
