"""Tiny configurations of families older than Llama, by a name for each."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tests.conftest import write_random

_TOKENS = {"vocab_size": 384, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_N_SIZES = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}


def _of(kind: str, *sizes: dict[str, Any], **values: Any) -> dict[str, Any]:
    merged: dict[str, Any] = {"model_type": kind} | _TOKENS
    for row in (*sizes, values):
        merged |= row
    return merged


OLDER: dict[str, dict[str, Any]] = {
    "bloom": _of("bloom", hidden_size=128, n_layer=2, n_head=4, seq_length=512),
    "codegen": _of("codegen", _N_SIZES, rotary_dim=16, n_ctx=512),
    "falcon": _of("falcon", _SIZES, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_multi_query": _of("falcon", _SIZES, multi_query=True, parallel_attn=True),
    "falcon_alibi": _of("falcon", _SIZES, alibi=True, bias=True, parallel_attn=False),
    "gpt_neo": _of(
        "gpt_neo",
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=16,
        max_position_embeddings=512,
        intermediate_size=256,
    ),
    "gpt_neox": _of("gpt_neox", _SIZES, intermediate_size=256),
    "gpt_neox_japanese": _of("gpt_neox_japanese", _SIZES),
    "gpt2": _of("gpt2", _N_SIZES),
    "gptj": _of("gptj", _N_SIZES, rotary_dim=16),
    "mpt": _of("mpt", d_model=128, n_heads=4, n_layers=2, max_seq_len=512),
    "opt": _of("opt", _SIZES, ffn_dim=256, word_embed_proj_dim=128),
    "starcoder2": _of(
        "starcoder2", _SIZES, num_key_value_heads=2, intermediate_size=256, use_bias=True
    ),
    "xglm": _of(
        "xglm",
        d_model=128,
        attention_heads=4,
        num_layers=2,
        ffn_dim=256,
        max_position_embeddings=512,
    ),
}


def write_older(folder: Path, name: str, **overrides: Any) -> Path:
    """A tiny random model in bf16, as transformers saves it, with a tokenizer."""
    return write_random(folder, AutoConfig.for_model(**(OLDER[name] | overrides)))
