"""ChatGLM2, ChatGLM3 and GLM-4-9B (model_type `chatglm`) as transformers' Glm.

Tensors, with N for a block, V rows of the padded vocabulary, H the hidden size, D the size of a
head, A query heads, G heads of K and of V, F the inner size of the feed-forward layer:

    transformer.embedding.word_embeddings.weight                         [V, H]
    transformer.encoder.layers.N.self_attention.query_key_value.weight   [(A + 2 G) D, H], and bias
    transformer.encoder.layers.N.self_attention.dense.weight             [H, A D]
    transformer.encoder.layers.N.mlp.dense_h_to_4h.weight                [2 F, H]: gate above up
    transformer.encoder.layers.N.mlp.dense_4h_to_h.weight                [H, F]
    transformer.encoder.final_layernorm.weight                           [H]
    transformer.output_layer.weight                                      [V, H]
    transformer.rotary_pos_emb.inv_freq                                  follows from the settings

The first half of each head turns, neighbouring channels together, by base 10000 * rope_ratio
(ChatGLM3-6B-32K: 50, GLM-4-9B-chat: 500). ChatGLM2-6B-32K, of the same vocabulary as ChatGLM3, has
the same key for another thing, positions divided by it, so that a ratio there says nothing alone.
Facts from modeling_chatglm.py and configuration_chatglm.py of THUDM/chatglm3-6b and
THUDM/glm-4-9b-chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.families.sizes import needed, size_in
from formats.published.layout import TOKENS, PublishedLayout, kept, require_settings

BASE = 10000.0
AMBIGUOUS_VOCABULARY = 65024  # ChatGLM2's and ChatGLM3's
NOT_FIRST = ("num_layers", "padded_vocab_size", "ffn_hidden_size")  # ChatGLM-6B has none of them
COMPUTED: dict[str, tuple[Any, ...]] = {
    "multi_query_attention": (True,),
    "rmsnorm": (True, None),
    "post_layer_norm": (True, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "add_bias_linear": (False, None),
    "pre_seq_len": (None, 0),
    "prefix_projection": (False, None),
    "quantization_bit": (None, 0),
    "vision_config": (None,),
}


def native_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the same model as transformers' Glm."""
    if not any(key in config for key in NOT_FIRST):
        raise CheckpointError(
            "config.json: a chatglm model without num_layers is one of the first generation "
            "(ChatGLM-6B), whose attention is not causal over the prompt and is not run here. Give "
            "ChatGLM2, ChatGLM3 or GLM-4"
        )
    require_settings(config, COMPUTED)
    heads, hidden = size_in(config, "num_attention_heads"), size_in(config, "hidden_size")
    return {
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        "vocab_size": size_in(config, "padded_vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": size_in(config, "ffn_hidden_size"),
        "num_hidden_layers": size_in(config, "num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": size_in(config, "multi_query_group_num"),
        "head_dim": config.get("kv_channels") or hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": size_in(config, "seq_length"),
        "rms_norm_eps": needed(config, "layernorm_epsilon"),
        "attention_bias": bool(config.get("add_qkv_bias")),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
        "rope_parameters": _rotation(config),
        **kept(config, ("dtype", "torch_dtype", *TOKENS)),
    }


def _rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding; what is given in transformers' own terms says more than a ratio."""
    given, ratio = config.get("rope_parameters"), config.get("rope_ratio") or 1
    if given is not None:
        return {"partial_rotary_factor": 0.5, **given}
    if ratio != 1 and config["padded_vocab_size"] == AMBIGUOUS_VOCABULARY:
        raise CheckpointError(
            f"config.json: rope_ratio {ratio} multiplies the rotary embedding's base in ChatGLM3, "
            "but divides positions in ChatGLM2, which only their code tells apart. Say which with "
            f'"rope_parameters": {{"rope_type": "default", "rope_theta": {BASE * ratio}}} for '
            f'ChatGLM3-6B-32K, or {{"rope_type": "linear", "factor": {float(ratio)}, "rope_theta": '
            f"{BASE}}} for ChatGLM2-6B-32K"
        )
    return {"rope_type": "default", "rope_theta": BASE * ratio, "partial_rotary_factor": 0.5}


_BLOCK, _NATIVE = "transformer.encoder.layers.{}", "model.layers.{}"
LAYOUT = PublishedLayout(
    model_type="chatglm",
    native_config=native_config,
    modules={
        "transformer.embedding.word_embeddings": ("model.embed_tokens",),
        f"{_BLOCK}.input_layernorm": (f"{_NATIVE}.input_layernorm",),
        f"{_BLOCK}.self_attention.query_key_value": tuple(
            f"{_NATIVE}.self_attn.{part}_proj" for part in "qkv"
        ),
        f"{_BLOCK}.self_attention.dense": (f"{_NATIVE}.self_attn.o_proj",),
        f"{_BLOCK}.post_attention_layernorm": (f"{_NATIVE}.post_attention_layernorm",),
        f"{_BLOCK}.mlp.dense_h_to_4h": (f"{_NATIVE}.mlp.gate_up_proj",),
        f"{_BLOCK}.mlp.dense_4h_to_h": (f"{_NATIVE}.mlp.down_proj",),
        "transformer.encoder.final_layernorm": ("model.norm",),
        "transformer.output_layer": ("lm_head",),
    },
    buffers=("inv_freq",),
)
