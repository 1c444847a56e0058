"""Llama with the biases of ALiBi in the place of its rotary embedding: Baichuan of 13B.

transformers has no class of it. This one is transformers' Llama with another attention, registered
as model_type `llama_alibi` when this file is imported, so that it is built, looked at, calibrated
and run as any other. It computes only with attention functions that know the argument `alibi`
(`formats.modeling.adapters`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

from formats.modeling.adapters import alibi_slopes


class LlamaAlibiConfig(LlamaConfig):
    """Llama's configuration; its rotary embedding is computed and not used."""

    model_type = "llama_alibi"


class AlibiAttention(LlamaAttention):
    """Attention of q and k as they are projected, biased by distance."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[B, T, hidden] to the same."""
        my: Any = self
        layers = (my.q_proj, my.k_proj, my.v_proj)
        heads = [layer(hidden_states).unflatten(-1, (-1, my.head_dim)) for layer in layers]
        q, k, v = (x.transpose(1, 2) for x in heads)
        slopes = alibi_slopes(q.shape[1], q.device)
        attend = ALL_ATTENTION_FUNCTIONS[my.config._attn_implementation]
        out, _ = attend(self, q, k, v, None, dropout=0.0, scaling=my.scaling, alibi=slopes)
        return my.o_proj(out.flatten(2)), None


class LlamaAlibiForCausalLM(LlamaForCausalLM):
    """Llama's decoder with that attention in each block."""

    config_class = LlamaAlibiConfig

    def __init__(self, config: LlamaAlibiConfig) -> None:
        super().__init__(config)
        layers: Any = self.model.layers
        for layer in layers:
            layer.self_attn.__class__ = AlibiAttention


AutoConfig.register(LlamaAlibiConfig.model_type, LlamaAlibiConfig)
AutoModelForCausalLM.register(LlamaAlibiConfig, LlamaAlibiForCausalLM)
