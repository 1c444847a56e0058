"""AutoRound (Cheng et al., arXiv 2309.05516): roundings by signed gradient descent.

Int4, symmetric, in groups of 128; without iterations it is its own way to round to nearest. With
average `bits` its AutoScheme chooses between int4 and int8 for every layer by itself, which the
layers of a fused one need not share. The model is measured in memory with the weights dequantized.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound  # pyright: ignore[reportMissingImports]

OPTIONS = "W4A16,W8A16"  # both symmetric, in groups of 128
MARGIN = 8  # tokens


def quantize(job: Any) -> Any:
    """Solve the loaded model in `options["iterations"]`, to average `options["bits"]` if given."""
    mixed = _mixed(job) if "bits" in job.options else None
    solver = AutoRound(
        job.load(),
        tokenizer=job.tokenizer(),
        scheme="W4A16" if mixed is None else mixed,
        dataset=_tokens(job) if mixed is None else mixed.dataset,
        iters=job.options["iterations"],
        seqlen=_length(job) if mixed is None else mixed.seqlen,
        nsamples=len(job.calibration),
        device_map="cpu",
        enable_torch_compile=False,
    )
    with job.timed():
        solved, chosen = solver.quantize()
    bits = {name: layer["bits"] for name, layer in chosen.items() if "bits" in layer}
    print(json.dumps(bits), flush=True)  # into the peer's log
    return solved.float()


def _length(job: Any) -> int:
    return min(map(len, job.calibration))


def _tokens(job: Any) -> Any:
    return [
        {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])}
        for ids in job.calibration
    ]


def _mixed(job: Any) -> Any:
    """What AutoScheme is asked, which takes no tokens: their text is in a file.

    A text that is cut into tokens again may come out a little shorter, and is then left out.
    """
    from auto_round import AutoScheme  # pyright: ignore[reportMissingImports]

    path, tokenizer = Path(job.scratch) / "calibration.jsonl", job.tokenizer()
    texts = [json.dumps({"text": tokenizer.decode(ids)}) for ids in job.calibration]
    path.write_text("\n".join(texts) + "\n")
    return AutoScheme(
        avg_bits=job.options["bits"],
        options=OPTIONS,
        dataset=str(path),
        nsamples=len(texts),
        seqlen=_length(job) - MARGIN,
        device_map="cpu",
        enable_torch_compile=False,
    )
