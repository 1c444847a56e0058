"""What the head of a .gguf file says of a model: the inverse of `settings` and of its tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from formats.errors import CheckpointError
from formats.gguf.architectures import (
    ARCHITECTURES,
    FACTORS,
    LONG,
    SHORT,
    Architecture,
    llama3_factors,
    query_scale,
)
from formats.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    RULES,
    SPECIAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    cuts_by,
)
from formats.namespace import later
from formats.scheme import either

with later():
    import tokenizers

NAMES = {kind: name for name, own in ARCHITECTURES.items() for kind in own.model_types}
"""Of architectures, by model_type."""
KEYS = {  # of config.json, by those of a file without its architecture
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "vocab_size": "vocab_size",
}
PROBES = (  # text on which rules that cut words differ
    "Hello world, it's 1234 o'clock; don't I'LL we'Ve?",
    "x = [1,2,3]\n\n\tif x:\r\n        return x  # two  spaces   three\n",
    "naïve café ÜBER 中文字符 日本語テスト 한국어 😀👩\u200d👧 ok",
    "CamelCase snake_case 7.89e-10 0x1F  \n \n  end ",
    "   leading\ttab\u00a0nbsp /path/to\\file http://a.b/c?d=e&f",
    "e\u0301 a\u0308 combining; $9.99 100% (a+b)^2 == \u00bd \u216b",
)


def architecture_of(config: Mapping[str, Any]) -> str:
    """Name of a model's architecture.

    Raises:
        CheckpointError: llama.cpp's files of its kind are not written here.
    """
    kind = config.get("model_type")
    name = NAMES.get(str(kind))
    if name is None:
        raise CheckpointError(
            f"found model_type {kind!r}, which is not written as GGUF here; written are "
            f"{either(sorted(NAMES))}. Keep the compressed-tensors layout"
        )
    return name


def require_writer() -> None:
    """Check that files can be written.

    Raises:
        CheckpointError: the package for it is not installed.
    """
    if find_spec("gguf") is None:
        raise CheckpointError(
            "the package gguf writes such files, which is not installed: pip install 'ptq[gguf]'"
        )


def model_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a file by their key: integers, floats, text.

    Raises:
        CheckpointError: the architecture, or how rotary embedding is scaled, is not written here.
    """
    name = architecture_of(config)
    architecture = ARCHITECTURES[name]
    found: dict[str, Any] = {key: config.get(own) for key, own in KEYS.items()}
    head_dim = _head_dim(config)
    found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    found["expert_count"] = config.get("num_local_experts") or config.get("num_experts")
    found["attention.sliding_window"] = _window(config, architecture)
    scale = config.get("query_pre_attn_scalar")
    if architecture.largest is not None and scale != query_scale(architecture, config):
        raise CheckpointError(
            f"found query_pre_attn_scalar {scale}; llama.cpp takes "
            f"{query_scale(architecture, config):g} in a model of this size, and a GGUF file does "
            "not hold it. Keep the compressed-tensors layout"
        )
    found |= _rope(config, name, head_dim)
    values = {f"{name}.{key}": value for key, value in found.items() if value is not None}
    return {"general.architecture": name, "general.type": "model"} | values


def _window(config: Mapping[str, Any], architecture: Architecture) -> int | None:
    """The window that a file tells of; 0 where it has a place for one and the model has none.

    Raises:
        CheckpointError: it has no place for one, or other layers have windows.
    """
    window, period = config.get("sliding_window"), architecture.window_period
    if period is None:
        if window and config.get("use_sliding_window", True):
            raise CheckpointError(
                f"found sliding_window {window} in a model of type {config['model_type']!r}, which "
                "a GGUF file does not hold. Keep the compressed-tensors layout"
            )
        return None
    kinds = config.get("layer_types")
    if period and kinds is not None:
        usual = [(i + 1) % period != 0 for i in range(len(kinds))]
        if [kind == "sliding_attention" for kind in kinds] != usual:
            raise CheckpointError(
                f"found layer_types of another pattern than every {period}th layer without a "
                "window, which a GGUF file of this architecture does not hold. Keep the "
                "compressed-tensors layout"
            )
    return window or 0


def _rotation(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], float | None]:
    """The parameters of rotary embedding, and the base of layers with a window if they have one."""
    own = config.get("rope_parameters") or {
        **(config.get("rope_scaling") or {}),
        "rope_theta": config.get("rope_theta", 10_000.0),
    }
    if "full_attention" not in own:
        return own, None
    return own["full_attention"], own.get("sliding_attention", {}).get("rope_theta")


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _rope(config: Mapping[str, Any], name: str, head_dim: int) -> dict[str, Any]:
    rope, local = _rotation(config)
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    found: dict[str, Any] = {
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        "rope.dimension_count": int(head_dim * part),
    }
    if local is not None and local != 10_000.0:
        found["rope.freq_base_swa"] = float(local)
    length = rope.get("original_max_position_embeddings") or config.get(
        "original_max_position_embeddings"
    )
    if name == "phi3" or kind in ("yarn", "longrope"):
        found["rope.scaling.original_context_length"] = length or config["max_position_embeddings"]
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    elif kind == "longrope":
        length = length or config["max_position_embeddings"]
        scale = config["max_position_embeddings"] / length
        usual = math.sqrt(1 + math.log(scale) / math.log(length)) if scale > 1 else 1.0
        found["rope.scaling.attn_factor"] = float(rope.get("attention_factor") or usual)
    elif kind not in ("default", "llama3"):
        raise CheckpointError(
            f"found rotary embedding of the kind {kind!r}, which is not written as GGUF here. Keep "
            "the compressed-tensors layout"
        )
    return found


def rope_tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Tensors of a file that say how angles are scaled: fp32 [D / 2], by name."""
    rope, _ = _rotation(config)
    if rope.get("rope_type") == "longrope":
        factors = {SHORT: rope["short_factor"], LONG: rope["long_factor"]}
        return {name: np.array(values, dtype=np.float32) for name, values in factors.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    return {FACTORS: llama3_factors(rope, _head_dim(config)).astype(np.float32)}


def tokenizer_metadata(folder: Path, rows: int) -> tuple[dict[str, Any], str | None]:
    """Values of a file of a folder's tokenizer, by key.

    Args:
        folder: Holds tokenizer.json and, if it may, its settings and chat template.
        rows: Rows of the embedding; tokens that a tokenizer has not are written as unused.

    Returns:
        The values; a sentence where words are cut otherwise there than here, else None.

    Raises:
        CheckpointError: there is no tokenizer.json, or it is no BPE.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: tokenizer.json is missing, which a GGUF file is made of")
    document, made = json.loads(path.read_bytes()), tokenizers.Tokenizer.from_file(str(path))
    model, settings = document["model"], _settings(folder)
    if model["type"] != "BPE":
        raise CheckpointError(
            f"{path}: found a tokenizer of the kind {model['type']}, which is not written as GGUF "
            "here; BPE is. Keep the compressed-tensors layout"
        )
    by_id = {i: token for token, i in made.get_vocab(with_added_tokens=True).items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(rows)]
    kinds = [NORMAL if i in by_id else UNUSED for i in range(rows)]
    for added in document["added_tokens"]:
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    values, note = _model_metadata(document, made, tokens, kinds)
    values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"] = tokens, kinds
    place = {token: i for i, token in enumerate(tokens)}
    for key, own in SPECIAL.items():
        text = settings.get(own)
        text = text.get("content") if isinstance(text, dict) else text
        if text in place:
            values[f"tokenizer.ggml.{key}_token_id"] = place[text]
    ends = _ends(folder) - {values.get("tokenizer.ggml.eos_token_id")}
    if ends:
        values["tokenizer.ggml.eot_token_id"] = min(ends)
    first = made.encode("a").ids[:1]
    bos = values.get("tokenizer.ggml.bos_token_id")
    values["tokenizer.ggml.add_bos_token"] = bos is not None and first == [bos]
    template = folder / "chat_template.jinja"
    text = template.read_text("utf-8") if template.is_file() else settings.get("chat_template")
    return values | ({"tokenizer.chat_template": text} if isinstance(text, str) else {}), note


def _settings(folder: Path, name: str = "tokenizer_config.json") -> dict[str, Any]:
    path = folder / name
    return json.loads(path.read_bytes()) if path.is_file() else {}


def _ends(folder: Path) -> set[int]:
    """Tokens that end an answer."""
    found = _settings(folder, "generation_config.json").get("eos_token_id")
    listed = found if isinstance(found, list) else [found]
    return {token for token in listed if isinstance(token, int)}


def _model_metadata(
    document: Mapping[str, Any],
    made: tokenizers.Tokenizer,
    tokens: list[str],
    kinds: list[int],
) -> tuple[dict[str, Any], str | None]:
    """What only one of the kinds of BPE has; `kinds` of bytes and of the unknown token are set."""
    model = document["model"]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    if not model.get("byte_fallback"):
        if '"ByteLevel"' not in json.dumps(document.get("pre_tokenizer") or {}):
            raise CheckpointError(
                "tokenizer.json: found a BPE of characters; written as GGUF are those of bytes and "
                "those that fall back to bytes. Keep the compressed-tensors layout"
            )
        rule, note = _nearest_rule(made, whole_words=bool(model.get("ignore_merges")))
        values = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": rule}
        return values | {"tokenizer.ggml.merges": [" ".join(pair) for pair in pairs]}, note
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(pairs):
        ranks.setdefault(left + right, rank)
    for i, token in enumerate(tokens):
        if token == model.get("unk_token"):
            kinds[i] = UNKNOWN
        elif len(token) == 6 and token.startswith("<0x"):
            kinds[i] = BYTE
    scores = [-float(ranks.get(token, len(pairs))) for token in tokens]
    metaspace = json.dumps(document.get("pre_tokenizer") or {})
    prefixed = '"Prepend"' in json.dumps(document.get("normalizer") or {}) or any(
        f'"prepend_scheme": "{when}"' in metaspace for when in ("first", "always")
    )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": prefixed,
    }, None


def _nearest_rule(made: tokenizers.Tokenizer, *, whole_words: bool) -> tuple[str, str | None]:
    """The rule that cuts most of the probes as a tokenizer does, and a note where it is not all."""
    cut = [[word for word, _ in made.pre_tokenizer.pre_tokenize_str(text)] for text in PROBES]
    alike = {
        name: sum(cuts_by(rule, text) == own for text, own in zip(PROBES, cut, strict=True))
        + (0.5 if rule.whole_words == whole_words else 0.0)
        for name, rule in RULES.items()
    }
    best = max(alike, key=lambda name: alike[name])
    if alike[best] == len(PROBES) + 0.5:
        return best, None
    return best, (
        f"llama.cpp has no rule that cuts text into words as this tokenizer does; {best!r}, the "
        "nearest, was written: some text gets other tokens there."
    )
