"""Baichuan and Baichuan 2 (model_type `baichuan`) as Llama, those of 13B with ALiBi.

All tensors are named as Llama's but for q, k and v, which are one, with H the hidden size:

    model.layers.N.self_attn.W_pack.weight          [3 H, H]: q above k above v
    model.layers.N.self_attn.rotary_emb.inv_freq    follows from the settings

Baichuan 2 divides each row of its head by the row's length when it computes (NormHead); the
published weights are those before. Its config.json has z_loss_weight, which Baichuan's has not.
The models of 13B have ALiBi in the place of the rotary embedding, and model_max_length as the only
length in their config.json. transformers has no such class: they are read as `llama_alibi`, which
is ours (`formats.modeling.llama_alibi`), and so are the checkpoints that are made of them. Facts
from modeling_baichuan.py and config.json of baichuan-inc/Baichuan-7B, Baichuan-13B,
Baichuan2-7B-Base and Baichuan2-13B-Base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.families.sizes import size_in
from formats.published.layout import TOKENS, PublishedLayout, kept

SAME = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "initializer_range",
    "dtype",
    "torch_dtype",
    *TOKENS,
)  # keys that mean what they mean in Llama's
SECOND_VOCABULARY = 125696


def native_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the same model as transformers' Llama, or ours with ALiBi."""
    rotary = config.get("max_position_embeddings") is not None
    own = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    with_alibi = {"architectures": ["LlamaAlibiForCausalLM"], "model_type": "llama_alibi"}
    length = "max_position_embeddings" if rotary else "model_max_length"
    return {
        **(own if rotary else with_alibi),
        **kept(config, SAME),
        "num_key_value_heads": size_in(config, "num_attention_heads"),
        "max_position_embeddings": size_in(config, length),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
    }


def unit_rows(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Baichuan 2's head."""
    second = "z_loss_weight" in config or config.get("vocab_size") == SECOND_VOCABULARY
    return ("lm_head",) if second else ()


_ATTENTION = "model.layers.{}.self_attn"
LAYOUT = PublishedLayout(
    model_type="baichuan",
    native_config=native_config,
    modules={f"{_ATTENTION}.W_pack": tuple(f"{_ATTENTION}.{part}_proj" for part in "qkv")},
    buffers=("inv_freq",),
    unit_rows=unit_rows,
)
