"""bitsandbytes through transformers: weights are quantized while they are loaded, without data.

LLM.int8() (Dettmers et al., arXiv 2208.07339): int8 rows of weights against int8 tokens, channels
of outliers aside in float. NF4 (Dettmers et al., arXiv 2305.14314): 4-bit quantiles of the normal
distribution in blocks of 64 weights. Settings are the package's defaults.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import BitsAndBytesConfig


def quantize(job: Any) -> Any:
    """Load the model with `options["bits"]`, 8 or 4."""
    if job.options["bits"] == 8:
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    with job.timed():
        return job.load(quantization_config=config, device_map="cpu")
