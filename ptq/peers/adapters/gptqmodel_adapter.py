"""GPTQModel: GPTQ (Frantar et al., arXiv 2210.17323), int4, symmetric, in groups of 128.

All else is the package's default. Its kernels for CPUs compute in fp16 or bf16; so that all peers
are judged on what they stored, its checkpoint is read back in fp16 (its scales are), and the linear
layers are replaced by what it makes of them in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # pyright: ignore[reportMissingImports]
from gptqmodel.nn_modules.qlinear import BaseQuantLinear  # pyright: ignore[reportMissingImports]


def quantize(job: Any) -> Any:
    """Solve the linear layers, and put what was saved into the original model."""
    config = QuantizeConfig(bits=4, group_size=128, sym=True)
    model = GPTQModel.load(job.model, config, device="cpu", dtype=torch.float32)
    data = [
        {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])}
        for ids in job.calibration
    ]
    with job.timed():
        model.quantize(data, batch_size=1)
    model.save(str(job.scratch))
    options = {"device": "cpu", "backend": BACKEND.TORCH, "dtype": torch.float16}
    return _dequantized(GPTQModel.load(str(job.scratch), **options).model, job.load())


def _dequantized(quantized: Any, model: Any) -> Any:
    """The float model with the weights of the quantized layers."""
    layers = {n: m for n, m in quantized.named_modules() if isinstance(m, BaseQuantLinear)}
    for name, layer in layers.items():
        weight = layer.dequantize_weight().T  # [out, in]
        model.get_submodule(name).weight.data.copy_(weight)
    return model
