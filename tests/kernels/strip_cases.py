"""Weights of experts for tests of strips: by the family of their kernel, one behind the other."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

FP8 = torch.float8_e4m3fn
FAMILIES = (
    "w4a16_zeros", "w8a16", "w8a16_whole", "w4a8", "w4a8_two_level", "w4a8_whole", "w8a8", "fp8",
    "fp8_block", "w16a16",
)  # fmt: skip
EXACT = ("w8a8", "w4a8_two_level", "w4a8_whole")  # sums of integers


def make_weights(family: str, experts: int, outputs: int, inputs: int, bias: bool = True) -> list:
    """A weight of each expert, random, views of one tensor a field as an engine has them."""
    own = [_weight(family, outputs, inputs, bias) for _ in range(experts)]
    held = {}
    for field in fields(own[0]):
        if isinstance(getattr(own[0], field.name), torch.Tensor):
            held[field.name] = torch.stack([getattr(weight, field.name) for weight in own])
    return [
        replace(weight, **{name: t[e] for name, t in held.items()}) for e, weight in enumerate(own)
    ]


def _weight(family: str, outputs: int, inputs: int, with_bias: bool):
    from kernels.triton.linear.dispatch import DenseWeight
    from kernels.triton.linear.fp8_block import pack_fp8_block
    from kernels.triton.linear.w4a8 import pack_w4a8
    from kernels.triton.linear.w4a16 import pack_w4a16
    from kernels.triton.linear.w8a8 import pack_w8a8
    from kernels.triton.linear.w8a16 import pack_w8a16

    base, _, kind = family.partition("_")
    bias = torch.randn(outputs) if with_bias else None
    low, high = (-8, 8) if base.startswith("w4") else (-127, 128)
    q = torch.randint(low, high, (outputs, inputs), dtype=torch.int8)
    groups = 1 if kind == "whole" else inputs // 64
    scale = torch.rand(outputs, groups) * 0.01 + 0.005
    zeros = torch.randint(-8, 8, scale.shape, dtype=torch.int8) if kind == "zeros" else None
    if kind == "two_level":
        scale = torch.randint(1, 17, scale.shape) * 2.0**-10
    if family == "w16a16":
        return DenseWeight((q.float() / 100).half(), None if bias is None else bias.half())
    if family == "fp8_block":
        return pack_fp8_block(q.to(FP8), torch.rand(-(-outputs // 128), inputs // 128), bias)
    if base in ("w8a8", "fp8"):
        return pack_w8a8(q.to(FP8) if base == "fp8" else q, scale[:, 0], bias)
    make = {"w4a16": pack_w4a16, "w8a16": pack_w8a16, "w4a8": pack_w4a8}[base]
    return make(q, scale, bias, zeros)


def make_rows(family: str, rows: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows as a family's kernel takes them, and their scales."""
    x = torch.randint(-100, 101, (rows, inputs), dtype=torch.int8)
    if family.startswith("fp8"):
        runs = inputs // 128 if family == "fp8_block" else 1
        return (x.float() / 30).to(FP8), torch.rand(rows, runs) + 0.1
    if "a8" in family:
        return x, torch.rand(rows, 1) + 0.1
    return (x.float() / 50).half(), None
