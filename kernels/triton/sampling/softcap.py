"""Logits of a vocabulary with a bound: c tanh(x / c) (Gemma 2, arXiv 2408.00118, section 2)."""

# pyright: reportMissingImports=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import require

PART = 4096  # logits of a program


@triton.jit
def softcap_kernel(logits, softcap, COUNT, PART: tl.constexpr):
    """Program (part of PART logits): tanh x = 1 - 2 / (e^(2 x) + 1), of any x without overflow."""
    i = tl.program_id(0).to(tl.int64) * PART + tl.arange(0, PART)
    x = tl.load(logits + i, mask=i < COUNT, other=0.0)
    y = softcap - 2.0 * softcap / (tl.exp(x * (2.0 / softcap)) + 1.0)
    tl.store(logits + i, y, mask=i < COUNT)


def softcap_logits(logits: Tensor, softcap: float) -> Tensor:
    """Bound logits, fp32 and contiguous, in place; gives them back. NaN stays.

    Raises:
        ValueError: they are not fp32, or not contiguous.
    """
    require(
        logits.dtype == torch.float32 and logits.is_contiguous(),
        f"logits are {logits.dtype} {tuple(logits.shape)}; needed is fp32, contiguous",
    )
    if logits.numel():
        softcap_kernel[(triton.cdiv(logits.numel(), PART),)](
            logits, softcap, logits.numel(), PART=PART, num_warps=8
        )
    return logits
