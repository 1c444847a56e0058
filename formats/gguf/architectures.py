"""Architectures of llama.cpp that are families here: their settings, and their tensors' names.

The names of tensors follow from a family's declaration; what is written here of each architecture
is its settings. Facts: gguf-py's constants and llama.cpp's models and converters.

Two things lie otherwise in these files. Rows of q and k of architectures that descend from Llama
are permuted, so that the channels of a head that turn together are neighbours. And a norm that
multiplies by 1 + w holds 1 + w.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from formats.errors import CheckpointError
from formats.families.block_layers import EMBEDDING, FINAL_NORM, HEAD
from formats.families.family import Attention, Family, GatedMLP, Mixture
from formats.families.registry import BY_TYPE
from formats.gguf.file import GgufFile
from formats.scheme import either

FACTORS = "rope_freqs.weight"  # what each pair's angle is divided by
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
NOT_WEIGHTS = (FACTORS, SHORT, LONG)
Values = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp.

    Attributes:
        model_type: Its name in config.json.
        own: Its settings beside those that all have, as config.json has them.
        mixture: The model_type where a file has experts, of one that may have some.
        also: Other model types that are written as it.
        permuted: Whether rows of q and k are permuted.
        needs_head: Whether a file holds the head where it is the embedding, too.
        wide: Whether hidden states leave the range of fp16, so that a model runs in bf16.
        window_period: N where every Nth layer has no window, 0 where all have the one that a file
            tells; None where files tell of no window.
        largest: Blocks of the largest model of a series; see `query_scale`.
    """

    model_type: str
    own: Callable[[GgufFile, Values], Values] = lambda _, __: {}
    mixture: str | None = None
    also: tuple[str, ...] = ()
    permuted: bool = False
    needs_head: bool = False
    wide: bool = False
    window_period: int | None = None
    largest: int | None = None

    @property
    def model_types(self) -> tuple[str, ...]:
        """All that are written as it."""
        return (self.model_type, *self.also, *((self.mixture,) if self.mixture else ()))


def find_architecture(file: GgufFile) -> Architecture:
    """That of a file.

    Raises:
        CheckpointError: it is not one of `ARCHITECTURES`.
    """
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        raise CheckpointError(
            f"{file.path}: found the architecture {file.architecture!r}, which is not read here; "
            f"known are {either(sorted(ARCHITECTURES))}. Give the folder of the original model: "
            "config.json, tokenizer.json and weights in safetensors"
        )
    return found


def settings(file: GgufFile) -> tuple[Values, Family]:
    """What config.json says of a file's model, without its tokens, and its family.

    Raises:
        CheckpointError: a value is missing or of another type, or a kind of rotation is not known.
    """
    architecture = find_architecture(file)
    mixed = file.value("{arch}.expert_count", int, 0) > 0
    model_type = (mixed and architecture.mixture) or architecture.model_type
    family, values = BY_TYPE[model_type], _common(file)
    values |= {"model_type": model_type} | architecture.own(file, values)
    attention = family.attention
    bias = "blk.0.attn_q.bias" in file.tensors
    if isinstance(attention, Attention) and attention.bias_setting is not None:
        values[attention.bias_setting] = bias
    return values, family


def _common(file: GgufFile) -> Values:
    """What all architectures have."""
    heads = file.count("{arch}.attention.head_count")
    hidden = file.count("{arch}.embedding_length")
    head_dim = file.count("{arch}.attention.key_length", hidden // heads)
    return {
        "vocab_size": _require(file, "token_embd.weight").shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": file.count("{arch}.block_count"),
        "intermediate_size": file.count("{arch}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.count("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _decimal(file.value("{arch}.attention.layer_norm_rms_epsilon", float)),
        "max_position_embeddings": file.count("{arch}.context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, head_dim),
    }


def _decimal(value: float) -> float:
    """The shortest decimal that is the same number in fp32, in which files hold it."""
    return float(str(np.float32(value)))


def _require(file: GgufFile, name: str) -> Any:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path}: {name} is missing; get the file again")
    return file.tensors[name]


def _rope(file: GgufFile, head_dim: int) -> Values:
    """Rotary embedding, as transformers' `rope_parameters`."""
    theta = _decimal(file.value("{arch}.rope.freq_base", float, 10_000.0))
    turned = file.count("{arch}.rope.dimension_count", head_dim)
    kind = file.value("{arch}.rope.scaling.type", str, "none")
    made: Values = {"rope_type": "default", "rope_theta": theta}
    if turned != head_dim:
        made["partial_rotary_factor"] = turned / head_dim
    length = file.value("{arch}.rope.scaling.original_context_length", int, 0)
    if SHORT in file.tensors:
        short, long = (_require(file, name).data.astype(float).tolist() for name in (SHORT, LONG))
        made |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        made["original_max_position_embeddings"] = length
        attention = file.value("{arch}.rope.scaling.attn_factor", float, 0.0)
        return made | ({"attention_factor": _decimal(attention)} if attention else {})
    if FACTORS in file.tensors:
        return made | _llama3(file, theta, turned)
    factor = file.value("{arch}.rope.scaling.factor", float, 1.0)
    if kind == "linear":
        return made | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return made | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": length,
        }
    if kind != "none":
        raise CheckpointError(
            f"{file.path}: found rotary embedding scaled by {kind!r}; known are none, linear, yarn "
            "and longrope. Give the folder of the original model"
        )
    return made


def _llama3(file: GgufFile, theta: float, turned: int) -> Values:
    """Llama 3's scaling, of which a file holds the factors alone: the numbers that give these.

    All models of that kind have 8192 positions and the bounds 1 and 4.
    """
    found = _require(file, FACTORS).data.astype(np.float64)
    factor, length = float(found.max()), 8192
    sizes = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    made = {"rope_type": "llama3", "factor": factor, **sizes}
    made["original_max_position_embeddings"] = length
    wanted = llama3_factors(made | {"rope_theta": theta}, turned)
    if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=1e-4):
        raise CheckpointError(
            f"{file.path}: {FACTORS} holds other factors than those of Llama 3's scaling, which "
            "config.json cannot say. Give the folder of the original model"
        )
    return made


def llama3_factors(rope: Mapping[str, Any], turned: int) -> np.ndarray:
    """What Llama 3's scaling divides each pair's angle by: fp64 [turned / 2].

    1 for wavelengths under L / high, the factor over L / low, smooth between (formula of
    transformers' `llama3`).
    """
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    length, factor = rope["original_max_position_embeddings"], float(rope["factor"])
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, turned, 2) / turned)
    smooth = (length / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(waves < length / high, 1.0, np.where(waves > length / low, factor, between))


def _llama(file: GgufFile, _: Values) -> Values:
    if not file.value("{arch}.expert_count", int, 0):
        return {}
    return {
        "sliding_window": None,
        "num_local_experts": file.count("{arch}.expert_count"),
        "num_experts_per_tok": file.count("{arch}.expert_used_count"),
    }


def _qwen_moe(file: GgufFile, _: Values) -> Values:
    shared = file.value("{arch}.expert_shared_feed_forward_length", int, 0)
    return {
        "num_experts": file.count("{arch}.expert_count"),
        "num_experts_per_tok": file.count("{arch}.expert_used_count"),
        "moe_intermediate_size": file.count("{arch}.expert_feed_forward_length"),
        "norm_topk_prob": file.architecture == "qwen3moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    } | ({"shared_expert_intermediate_size": shared} if shared else {})


def query_scale(architecture: Architecture, values: Mapping[str, Any]) -> float:
    """What queries are divided by the root of: no file says it, llama.cpp knows it by the size.

    It is the size of a head, but in the largest models of a series the width divided by the heads.
    """
    if values["num_hidden_layers"] == architecture.largest:
        return values["hidden_size"] / values["num_attention_heads"]
    return values["head_dim"]


def _gemma2(file: GgufFile, values: Values) -> Values:
    return {
        "attn_logit_softcapping": file.value("{arch}.attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": file.value("{arch}.final_logit_softcapping", float, 30.0),
        "sliding_window": file.count("{arch}.attention.sliding_window", 4096),
        "query_pre_attn_scalar": query_scale(find_architecture(file), values),
    }


def _gemma3(file: GgufFile, values: Values) -> Values:
    local = _decimal(file.value("{arch}.rope.freq_base_swa", float, 10_000.0))
    softcap = file.value("{arch}.final_logit_softcapping", float, 0.0)
    return {
        "sliding_window": file.count("{arch}.attention.sliding_window", 4096),
        "query_pre_attn_scalar": query_scale(find_architecture(file), values),
        "final_logit_softcapping": softcap or None,
        "rope_parameters": {
            "full_attention": values["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _phi3(file: GgufFile, values: Values) -> Values:
    window = file.value("{arch}.attention.sliding_window", int, 0)
    length = file.value(
        "{arch}.rope.scaling.original_context_length", int, values["max_position_embeddings"]
    )
    return {"sliding_window": window or None, "original_max_position_embeddings": length}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, mixture="mixtral", also=("mistral",), permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", _qwen_moe, needs_head=True),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", _qwen_moe),
    "gemma2": Architecture("gemma2", _gemma2, wide=True, window_period=2, largest=46),
    "gemma3": Architecture("gemma3_text", _gemma3, wide=True, window_period=6, largest=62),
    "phi3": Architecture("phi3", _phi3, window_period=0),
    "olmo2": Architecture("olmo2", needs_head=True),
    "glm4": Architecture("glm4"),
}

_IN_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_OUTSIDE = {"token_embd": EMBEDDING, "output_norm": FINAL_NORM, "output": HEAD}


def tensor_names(family: Family) -> dict[str, str]:
    """Own names of a block's modules here, below it, by those of a file; {} is an expert's index.

    Of a file they stand between `blk.N.` and `.weight` or `.bias`.
    """
    attention, norms = family.attention, family.norms
    assert isinstance(attention, Attention)
    here = f"{attention.module}."
    names = {"attn_output": here + attention.o}
    if attention.stored_merged:
        names["attn_qkv"] = here + attention.merged
    else:
        names |= {f"attn_{n}": here + own for n, own in zip("qkv", attention.qkv, strict=True)}
    if attention.qk_norm != "none":
        names |= {"attn_q_norm": here + attention.q_norm, "attn_k_norm": here + attention.k_norm}
    names |= _feed_forward(family.feed_forward, "mlp", "")
    if family.mixture is not None:
        names |= _experts(family.mixture)
    places = {
        "attn_norm": norms.before_attention,
        "post_attention_norm": norms.after_attention,
        "ffn_norm": norms.before_feed_forward,
        "post_ffw_norm": norms.after_feed_forward,
    }
    return names | {name: own for name, own in places.items() if own is not None}


def _feed_forward(layer: GatedMLP, module: str, end: str) -> dict[str, str]:
    down = {f"ffn_down{end}": f"{module}.{layer.down}"}
    if layer.stored_merged:
        return down | {f"ffn_up{end}": f"{module}.{layer.merged}"}
    return down | {
        f"ffn_gate{end}": f"{module}.{layer.gate}",
        f"ffn_up{end}": f"{module}.{layer.up}",
    }


def _experts(mixture: Mixture) -> dict[str, str]:
    module = mixture.module
    names = {"ffn_gate_inp": f"{module}.{mixture.router}"}
    names |= _feed_forward(mixture.expert, f"{module}.experts.{{}}", "_exps")
    if mixture.shared is not None:
        names |= _feed_forward(GatedMLP(), f"{module}.{mixture.shared}", "_shexp")
    if mixture.shared_gate is not None:
        names["ffn_gate_inp_shexp"] = f"{module}.{mixture.shared_gate}"
    return names


def own_name(name: str, names: Mapping[str, str]) -> str | None:
    """Full name here of a file's tensor, {} for an expert's index; None if it is not known."""
    match = _IN_BLOCK.fullmatch(name)
    if match is not None:
        inside = names.get(match[2])
        return None if inside is None else f"model.layers.{match[1]}.{inside}.{match[3]}"
    module, _, leaf = name.rpartition(".")
    return f"{_OUTSIDE[module]}.{leaf}" if module in _OUTSIDE and leaf == "weight" else None


def file_name(name: str, names: Mapping[str, str]) -> str | None:
    """The inverse of `own_name`, of a tensor that is no expert's; None if a file has none such."""
    module, _, leaf = name.rpartition(".")
    outside = {own: there for there, own in _OUTSIDE.items()}
    if module in outside:
        return f"{outside[module]}.{leaf}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    inside = {own: there for there, own in names.items()}
    if match is None or match[2] not in inside:
        return None
    return f"blk.{match[1]}.{inside[match[2]]}.{leaf}"


def neighbours(rows: int, heads: int) -> np.ndarray:
    """Which row of q or k here each row of a permuted file is: int64 [rows].

    Channels i and i + D / 2 of a head turn together here; there they are 2 i and 2 i + 1.
    """
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
