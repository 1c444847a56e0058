"""AutoRound (Cheng et al., arXiv 2309.05516): roundings by signed gradient descent.

Int4, symmetric, in groups of 128; without iterations it is its own way to round to nearest. The
model is measured in memory with the weights dequantized.
"""

from __future__ import annotations

from typing import Any

import torch
from auto_round import AutoRound  # pyright: ignore[reportMissingImports]


def quantize(job: Any) -> Any:
    """Solve the loaded model with `options["iterations"]`."""
    model = job.load()
    data = [
        {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])}
        for ids in job.calibration
    ]
    solver = AutoRound(
        model,
        tokenizer=job.tokenizer(),
        scheme="W4A16",
        dataset=data,
        iters=job.options["iterations"],
        seqlen=min(map(len, job.calibration)),
        nsamples=len(data),
        device_map="cpu",
        enable_torch_compile=False,
    )
    with job.timed():
        solved, _ = solver.quantize()
    return solved.float()
