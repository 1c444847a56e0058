"""MiMo-7B (Xiaomi 2025, arXiv 2505.07608): Qwen2 and a layer that predicts further tokens.

The layer is in a list of its own and reads the last block's output as it is, without the last norm.
Facts: config.json of XiaomiMiMo/MiMo-7B-RL, and what its authors' branch of vLLM computes.
"""

from dataclasses import replace

from formats.families.declared import qwen2
from formats.families.predicting import Predicting

FAMILY = replace(
    qwen2.FAMILY,
    model_types=("mimo",),
    predicting=Predicting(
        module="model.mtp_layers.0",
        embedded_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        joined="input_proj",
        norm="final_layernorm",
        hidden_first=True,
        reads_normed=False,
    ),
    alike="qwen2",
    paddle=None,
)
