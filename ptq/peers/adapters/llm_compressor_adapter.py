"""llm-compressor: round to nearest, GPTQ, AWQ and SmoothQuant by its own `oneshot`.

Its defaults but for what the name of the peer says; `lm_head` stays in float. The model is measured
in memory, with its weights and inputs quantized and dequantized, as the package simulates them.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports]
    QuantizationArgs,
    QuantizationScheme,
)
from datasets import Dataset
from llmcompressor import oneshot  # pyright: ignore[reportMissingImports]
from llmcompressor.modifiers.gptq import GPTQModifier  # pyright: ignore[reportMissingImports]
from llmcompressor.modifiers.quantization import (  # pyright: ignore[reportMissingImports]
    QuantizationModifier,
)
from llmcompressor.modifiers.transform.awq import (  # pyright: ignore[reportMissingImports]
    AWQModifier,
)
from llmcompressor.modifiers.transform.smoothquant import (  # pyright: ignore[reportMissingImports]
    SmoothQuantModifier,
)
from llmcompressor.pipelines.cache import (  # pyright: ignore[reportMissingImports]
    IntermediatesCache,
)


def quantize(job: Any) -> Any:
    """Quantize with the modifiers that `options` ask for."""
    if not torch.accelerator.is_available():
        # AWQ pins memory for an accelerator whether there is one or not; no figure depends on it
        IntermediatesCache.pin_memory = lambda self, *_: None
    model = job.load()
    rows = {
        "input_ids": [ids.tolist() for ids in job.calibration],
        "attention_mask": [[1] * len(ids) for ids in job.calibration],
    }
    with job.timed():
        oneshot(
            model=model,
            tokenizer=job.tokenizer(),
            dataset=Dataset.from_dict(rows),
            recipe=modifiers(**job.options),
            num_calibration_samples=len(job.calibration),
            max_seq_length=max(map(len, job.calibration)),
            shuffle_calibration_samples=False,
        )
    return model


def modifiers(
    rounding: str, scheme: str, before: str | None = None, group: int | None = None
) -> list[Any]:
    """What prepares, where `before` names it, and what rounds; int4 in groups of `group` inputs
    where the package's own 128 do not divide the model's.
    """
    first = {
        None: list,
        "awq": lambda: [AWQModifier()],
        "smoothquant": lambda: [SmoothQuantModifier(smoothing_strength=0.8)],
    }[before]
    last = {"rtn": QuantizationModifier, "gptq": GPTQModifier}[rounding]
    if scheme == "static":
        own = {"weights": _int(8, "channel"), "input_activations": _int(8, "tensor")}
    elif group is not None:
        own = {"weights": _int(4, "group", group_size=group)}
    else:
        return [*first(), last(targets=["Linear"], scheme=scheme, ignore=["lm_head"])]
    layers = QuantizationScheme(targets=["Linear"], **own)
    return [*first(), last(config_groups={"group_0": layers}, ignore=["lm_head"])]


def _int(bits: int, strategy: str, **more: Any) -> Any:
    settings: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True}
    return QuantizationArgs(strategy=strategy, **settings, **more)  # pyright: ignore[reportArgumentType]
