"""Layouts of checkpoints that hold a model of text otherwise than transformers' class of it does:
those published with code of their own, and those that hold a model of images beside it.

Their code is never run: a layout says how config.json and the tensors' names become those of the
native class. Whoever opens such a folder sees the native model, and writes that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from formats.errors import CheckpointError
from formats.families.registry import causal_class, is_causal_lm, is_ours, unsupported
from formats.families.sizes import needed, size_in

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class PublishedLayout:
    """How checkpoints of a `model_type` lie that transformers knows by another name.

    Attributes:
        native_config: Their config.json as that of the native class; CheckpointError where it
            describes a model that the native class does not compute.
        modules: Native names of what each module holds, by its published name, both with `{}` for
            the number of the block: one, or those of q, k and v, whose rows lie one below the
            other.
        buffers: Last parts of the names of tensors that follow from the configuration.
        prefixes: Beginnings of names that stand for others in the native class; None for those of
            tensors that it has not.
        unit_rows: Native names of the modules whose rows are divided by their length before they
            multiply, as config.json tells.
    """

    model_type: str
    native_config: Callable[[Mapping[str, Any]], dict[str, Any]]
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    prefixes: Mapping[str, str | None] = field(default_factory=dict)
    unit_rows: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda _: ()


def require_settings(config: Mapping[str, Any], allowed: Mapping[str, Iterable[Any]]) -> None:
    """Refuse a model that the native class does not compute.

    Args:
        allowed: Values of each key that it computes; None for an absent one.

    Raises:
        CheckpointError: another value is there; the key is named.
    """
    for key, values in allowed.items():
        if config.get(key) not in values:
            shown = " or ".join("absent" if value is None else repr(value) for value in values)
            raise CheckpointError(
                f"config.json: {key} is {config.get(key)!r} in a {config['model_type']} model; "
                f"read without the model's own code is {shown}"
            )


def kept(config: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Those keys that config.json has, with their values."""
    return {key: config[key] for key in keys if config.get(key) is not None}


SAME_AS_LLAMA = (
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


def _baichuan_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a baichuan model as transformers' Llama, or ours with ALiBi.

    The models of 13B have ALiBi in the place of the rotary embedding, and model_max_length as the
    only length in their config.json. transformers has no such class: they are read as
    `llama_alibi`, which is ours (`formats.modeling.llama_alibi`), and so are the checkpoints that
    are made of them. Facts from modeling_baichuan.py and config.json of baichuan-inc/Baichuan-7B,
    Baichuan-13B, Baichuan2-7B-Base and Baichuan2-13B-Base.
    """
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
        **kept(config, SAME_AS_LLAMA),
        "num_key_value_heads": size_in(config, "num_attention_heads"),
        "max_position_embeddings": size_in(config, length),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
    }


def _second_head(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Baichuan 2's head, of which each row is divided by its length when it computes (NormHead).

    The published weights are those before. Its config.json has z_loss_weight, which Baichuan's has
    not.
    """
    second = "z_loss_weight" in config or config.get("vocab_size") == SECOND_VOCABULARY
    return ("lm_head",) if second else ()


_ATTENTION = "model.layers.{}.self_attn"
BAICHUAN = PublishedLayout(
    model_type="baichuan",
    native_config=_baichuan_config,
    modules={f"{_ATTENTION}.W_pack": tuple(f"{_ATTENTION}.{part}_proj" for part in "qkv")},
    buffers=("inv_freq",),
    unit_rows=_second_head,
)
"""Baichuan and Baichuan 2 as Llama.

All tensors are named as Llama's but for q, k and v, which are one, with H the hidden size:

    model.layers.N.self_attn.W_pack.weight          [3 H, H]: q above k above v
    model.layers.N.self_attn.rotary_emb.inv_freq    follows from the settings
"""


BASE = 10000.0
AMBIGUOUS_VOCABULARY = 65024  # ChatGLM2's and ChatGLM3's
NOT_FIRST = ("num_layers", "padded_vocab_size", "ffn_hidden_size")  # ChatGLM-6B has none of them
CHATGLM_COMPUTES: dict[str, tuple[Any, ...]] = {
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


def _chatglm_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a chatglm model as transformers' Glm."""
    if not any(key in config for key in NOT_FIRST):
        raise CheckpointError(
            "config.json: a chatglm model without num_layers is one of the first generation "
            "(ChatGLM-6B), whose attention is not causal over the prompt and is not run here. Give "
            "ChatGLM2, ChatGLM3 or GLM-4"
        )
    require_settings(config, CHATGLM_COMPUTES)
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
    """The rotary embedding; what is given in transformers' own terms says more than a ratio.

    The first half of each head turns, neighbouring channels together, by base 10000 * rope_ratio
    (ChatGLM3-6B-32K: 50, GLM-4-9B-chat: 500). ChatGLM2-6B-32K, of the same vocabulary as ChatGLM3,
    has the same key for another thing, positions divided by it, so that a ratio there says nothing
    alone.
    """
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
CHATGLM = PublishedLayout(
    model_type="chatglm",
    native_config=_chatglm_config,
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
"""ChatGLM2, ChatGLM3 and GLM-4-9B as transformers' Glm.

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

Facts from modeling_chatglm.py and configuration_chatglm.py of THUDM/chatglm3-6b and
THUDM/glm-4-9b-chat.
"""


PREFIXES: dict[str, str | None] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "language_model.": "model.",
    **{
        f"{model}{part}.": None
        for model in ("", "model.")
        for part in (
            *("vision_tower", "multi_modal_projector", "audio_tower", "visual"),
            *("embed_vision", "embed_audio", "vision_embedder"),
        )
    },
}
GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}


def _text_config(config: Mapping[str, Any], *, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the text's model, of a model of text and images.

    Args:
        config: Of both.
        defaults: What text_config may leave out.

    Raises:
        CheckpointError: there is no text_config, or it is of no causal decoder.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(
            f"config.json: text_config is missing in a {config['model_type']} model. Copy that of "
            "the original model"
        )
    if not is_causal_lm(text):
        raise CheckpointError(f"config.json: {unsupported(text, 'text_config')}")
    both = ("tie_word_embeddings", "dtype", "torch_dtype", *TOKENS)
    return {**defaults, **text, **kept(config, both), "architectures": [causal_class(text)]}


WITH_IMAGES = tuple(
    PublishedLayout(
        model_type=model_type,
        native_config=partial(_text_config, defaults=defaults),
        prefixes=PREFIXES,
    )
    for model_type, defaults in (
        ("gemma3", GEMMA3),
        *((kind, {}) for kind in ("gemma3n", "gemma4", "gemma4_unified", "mistral3")),
        *((kind, {}) for kind in ("lfm2_vl", "qwen3_5", "qwen3_5_moe")),
    )
)
"""Models of text and more, of which the part that computes text is read: gemma3, qwen3_5, others.

Their config.json holds the text's as `text_config`, and their tensors are the text's under a prefix
beside those of the images, which are left out: what is quantized and run sees text alone.

    language_model.model.X, model.language_model.X, language_model.X    X below the text's `model`
    language_model.lm_head.weight, lm_head.weight     its head
    [model.]vision_tower, [model.]visual and the like    of images and sound

Layers that predict further tokens (Qwen3.5's `mtp.X`) keep their names.

Gemma 3's text_config leaves out what its class has by default. Facts from config.json of
google/gemma-3-4b-it and transformers' Gemma3TextConfig, MistralConfig, Mistral3Config and
Qwen3_5Config.
"""


_BY_TYPE = {layout.model_type: layout for layout in (BAICHUAN, CHATGLM, *WITH_IMAGES)}
TURNED = {"gpt2": ("c_attn", "c_proj", "c_fc")}
"""By model_type, last parts of the names of linear layers whose float weights lie as [in, out]:
transformers' class holds them in its Conv1D, which multiplies by them from the right. Here they are
linear layers as all others; what is quantized is stored as [out, in]."""


def is_turned(config: Mapping[str, Any], module: str) -> bool:
    """Whether the float weight of a module, by its full or own name, is stored as [in, out]."""
    turned = TURNED.get(str(config.get("model_type")), ())
    return module.rpartition(".")[2] in turned


def find_layout(config: Mapping[str, Any]) -> PublishedLayout | None:
    """The layout that a config.json names; None where it names none of them."""
    return _BY_TYPE.get(str(config.get("model_type")))


def needs_code(config: Mapping[str, Any]) -> bool:
    """Whether a model is none without the code that is beside it (auto_map).

    It needs none in a layout that is known here, nor of a class that is, nor where its code is that
    transformers has for its model_type: such files were published before transformers had it, and
    are what transformers reads without trust in others' code.
    """
    code = config.get("auto_map")
    if code is None or find_layout(config) is not None or is_ours(config):
        return False
    own = code.get("AutoModelForCausalLM") if isinstance(code, Mapping) else None
    native, name = causal_class(config), str(own).rpartition(".")[2]
    return native is None or name.lower() != native.lower()
