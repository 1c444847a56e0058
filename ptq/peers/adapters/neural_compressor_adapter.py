"""Intel Neural Compressor: weight-only round to nearest, int4, symmetric, in groups of 128."""

from __future__ import annotations

from typing import Any

from neural_compressor.torch.quantization import (  # pyright: ignore[reportMissingImports]
    RTNConfig,
    convert,
    prepare,
)


def quantize(job: Any) -> Any:
    """Round the linear layers of the loaded model."""
    model = job.load()
    config = RTNConfig(bits=4, use_sym=True, group_size=128, use_layer_wise=False)
    with job.timed():
        return convert(prepare(model, config))
