"""Two models' logits for the same tokens, compared row by row in fp64.

With p and q for both distributions over the vocabulary and z for the logarithm of a row's sum of
exponentials, a row's divergence is KL(p || q) = sum_v p(v) (x_p(v) - x_q(v)) - z_p + z_q: one
exponential a logit. The first sum lacks nothing where two logits differ little, as they are in
fp64. On a CPU a compiled kernel goes through a row once (`kernels/cpu/csrc/compare.h`); else some
rows go through torch's ops at a time, where the original's are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.cpu import native

TOP = 5
CHUNK_ELEMENTS = 1 << 20  # logits widened to fp64 at a time: 8 MB, which a CPU's caches hold
ON_GPU = 8  # times as many there, where launches would else take longer than the work


def compare_rows(original: Tensor, quantized: Tensor, targets: Tensor) -> Tensor:
    """What two models say of each token; figures of a row are not finite where its logits are not.

    Args:
        original: fp32 [n, vocabulary], where row i predicts target i.
        quantized: Of the quantized model, of the same shape, on any device.
        targets: int64 [n].

    Returns:
        fp64 [5, n] where the original is: -ln p(target), -ln q(target), KL(p || q), 1 where both
        have the same most likely token, else 0, and the share of p's 5 most likely tokens that are
        among q's.

    Raises:
        ValueError: shapes differ, or a target is no token.
    """
    targets = targets.to(original.device)
    size = original.shape[-1]
    tokens = len(targets) == len(original) and bool(((targets >= 0) & (targets < size)).all())
    if quantized.shape != original.shape or not tokens:
        shapes = f"{tuple(original.shape)}, {tuple(quantized.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"logits and targets are {shapes}; needed are [n, V] twice and n tokens")
    if original.device.type == "cpu" and native.library() is not None:
        rows = [x.float().contiguous() for x in (original, quantized.cpu())]
        found = torch.empty(5, len(original), dtype=torch.float64)
        native.call("compare", *rows, targets.contiguous(), found, *rows[0].shape)
        return found
    parts = [
        torch.stack(_compared(p, q, targets[own])) for own, p, q in _chunks(original, quantized)
    ]
    return torch.cat(parts, dim=1)


def _chunks(original: Tensor, quantized: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some rows of both at a time, where the original's are."""
    times = ON_GPU if original.device.type == "cuda" else 1
    rows = max(1, CHUNK_ELEMENTS * times // original.shape[1])
    for start in range(0, len(original), rows):
        part = slice(start, start + rows)
        yield part, original[part], quantized[part].to(original.device)


def _compared(original: Tensor, quantized: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """The figures of some rows."""
    both = original, quantized
    p, q = (x.to(torch.float64, copy=True) for x in both)
    apart = p - q
    most = [x.amax(-1, keepdim=True) for x in (p, q)]
    sums = [x.sub_(m).exp_().sum(-1) for x, m in zip((p, q), most, strict=True)]
    z = [s.log() + m[:, 0] for s, m in zip(sums, most, strict=True)]
    kl = torch.linalg.vecdot(p, apart) / sums[0] - z[0] + z[1]
    nll = (s - x.gather(-1, targets[:, None])[:, 0] for s, x in zip(z, both, strict=True))
    first, second = (x.topk(min(TOP, x.shape[1])).indices for x in both)
    top1 = (original.argmax(-1) == quantized.argmax(-1)).double()
    common = (first[:, :, None] == second[:, None, :]).any(-1).double().mean(-1)
    return *nll, kl.clamp(min=0.0), top1, common  # rounding may leave -1e-17
