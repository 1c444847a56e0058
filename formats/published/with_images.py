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

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from formats.errors import CheckpointError
from formats.families.registry import causal_class, is_causal_lm, unsupported
from formats.published.layout import TOKENS, PublishedLayout, kept

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


def native_config(config: Mapping[str, Any], *, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the text's model.

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


LAYOUTS = tuple(
    PublishedLayout(
        model_type=model_type,
        native_config=partial(native_config, defaults=defaults),
        prefixes=PREFIXES,
    )
    for model_type, defaults in (
        ("gemma3", GEMMA3),
        *((kind, {}) for kind in ("gemma3n", "gemma4", "gemma4_unified", "mistral3")),
        *((kind, {}) for kind in ("lfm2_vl", "qwen3_5", "qwen3_5_moe")),
    )
)
