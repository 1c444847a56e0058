"""What vLLM can take of a checkpoint, told before it starts: by name, and with what it costs.

vLLM refuses some things late and with words of its own, and others it takes in another sense than
ours, without a word. What is said here holds of vLLM 0.32 and 0.33: their readers of
`quantization_config`, and what their CPU build was seen to do.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.errors import RequestError
from formats.families.table import read_table
from formats.stored.folder import ConfigFile, read_config

REPORT = Path("report/report.json")  # beside the checkpoint's folder, in the output of its run
BLOCK = 128  # of weights in blocks
TIED = "tied_"  # before the strategy of a head whose integers are the embedding's
BY_VLLM = {"mxfp8": "mxfp8-quantized", "mxfp4": "mxfp4-pack-quantized"}


@dataclass(frozen=True)
class Shards:
    """Over how many GPUs vLLM is to spread a model.

    Attributes:
        tensor: GPUs that share each layer.
        pipeline: Groups of them that each hold a part of the layers.
    """

    tensor: int = 1
    pipeline: int = 1


def check_vllm(folder: Path, shards: Shards) -> list[str]:
    """What differs where vLLM serves a checkpoint, a sentence or more each.

    Args:
        folder: Of the checkpoint.
        shards: How it is spread.

    Raises:
        CheckpointError: it is no checkpoint.
        RequestError: vLLM cannot serve it so; tells every reason.
    """
    config = read_config(folder)
    refusals = [*_of_head(config), *_of_shards(config, shards)]
    if refusals:
        raise RequestError("\n".join([f"vLLM cannot serve {folder}:", *refusals]))
    return [*_of_family(config), *_of_inputs(config), *_of_cache(folder, config)]


def _groups(config: ConfigFile) -> Iterator[Mapping[str, Any]]:
    """The groups of layers in a `quantization_config` of compressed-tensors."""
    yield from (config.quantization or {}).get("config_groups", {}).values()


def _of_head(config: ConfigFile) -> Iterator[str]:
    if any(str(_weights(group).get("strategy")).startswith(TIED) for group in _groups(config)):
        yield (
            "its lm_head and its embedding are one quantized tensor, which only this engine knows. "
            "Add the method `untie` to the recipe, or `ignore: [lm_head]`, and run it again"
        )


def _of_shards(config: ConfigFile, shards: Shards) -> Iterator[str]:
    """Sizes that do not divide, and groups of scales that a cut would go through."""
    model, ranks = config.model, shards.tensor
    heads, layers = model.get("num_attention_heads"), model.get("num_hidden_layers")
    if isinstance(layers, int) and shards.pipeline > layers:
        yield f"it has {layers} layers, too few for --pipeline-parallel {shards.pipeline}"
    if ranks == 1 or not isinstance(heads, int):
        return
    if heads % ranks:
        yield f"it has {heads} attention heads, which --tensor-parallel {ranks} does not divide"
    head_size = model.get("head_dim") or model.get("hidden_size", 0) // heads
    inputs = {
        "o_proj": heads * head_size,
        "down_proj": model.get("intermediate_size"),
    }
    for size in {_group_size(_weights(group)) for group in _groups(config)} - {None}:
        for name, width in inputs.items():
            if isinstance(width, int) and (width % ranks or width // ranks % (size or 1)):
                yield (
                    f"{name} has {width} inputs with a scale for every {size}, and "
                    f"--tensor-parallel {ranks} would cut through a group; take fewer GPUs, "
                    "--pipeline-parallel, or smaller groups"
                )


def _weights(group: Mapping[str, Any]) -> Mapping[str, Any]:
    return group.get("weights") or {}


def _group_size(weights: Mapping[str, Any]) -> int | None:
    """Inputs that share a scale; None where all do."""
    return BLOCK if weights.get("strategy") == "block" else weights.get("group_size")


def _of_family(config: ConfigFile) -> Iterator[str]:
    listed = {row["family"]: row["vLLM"] for row in read_table()}
    family = str((config.published or config.model).get("model_type"))
    if listed.get(family) == "no":
        yield f"model: vLLM 0.33 does not list {family!r}; a newer one may."
    elif listed.get(family) == "transformers":
        yield f"model: vLLM runs {family!r} by transformers' code, slower than models of its own."


def _of_inputs(config: ConfigFile) -> Iterator[str]:
    """Formats whose inputs are float here, and may be quantized there."""
    formats = {group.get("format") for group in _groups(config)}
    for name, stored in BY_VLLM.items():
        if stored in formats and any(g.get("input_activations") is None for g in _groups(config)):
            yield (
                f"inputs: the weights are {name} and the inputs float; where a GPU multiplies "
                f"{name} itself, vLLM quantizes the inputs, too, which was not measured here."
            )


def _of_cache(folder: Path, config: ConfigFile) -> Iterator[str]:
    """A cache of ours is not served: what that costs, and what comes near to it."""
    if config.own is None or not config.own.any:
        return
    caches = (config.own.kv_cache, *config.own.kv_caches.values())
    named = {("dynamic " if c.dynamic else "static ") + c.name: c for c in caches if c is not None}
    bits = [(c.bits_of("k_cache") + c.bits_of("v_cache")) / 2 for c in named.values()]
    yield (
        f"cache: vLLM does not serve this checkpoint's cache of keys and values "
        f"({', '.join(named)}), but one of 16 bits: a token takes {16 / max(bits):.3g} times the "
        "memory, so that as many fewer fit."
    )
    output = folder.resolve().parent
    told = _measured(output / REPORT)
    if told is not None:
        whole, alone, sequences = told
        yield (
            f"accuracy: the KL divergence to the original is {alone:.4f} nats with a float cache, "
            f"and {whole:.4f} with the checkpoint's own ({sequences} sequences of its evaluation)."
        )
    else:
        yield (
            "accuracy: no report of this checkpoint tells it with a float cache. "
            f"`{shlex.join(['ptq', 'report', str(output)])}` measures it, where that is the output "
            "of its run."
        )
    yield (
        "memory: `-- --kv-cache-dtype int8_per_token_head` (or fp8_per_token_head) caches in 8 "
        "bits with scales of each token, where vLLM's attention has it. What that loses is told by"
        f"\n{_solving(output)}"
    )


def _solving(output: Path) -> str:
    """The commands that measure a run's checkpoint with the caches that vLLM has."""
    lines = []
    for dtype in ("int8", "fp8_e4m3"):
        to = shlex.quote(f"{output}_{dtype}_token")
        lines.append(
            f"      ptq solve {shlex.quote(str(output))} --set scheme.kv_cache.dtype={dtype} --set "
            f"scheme.kv_cache.granularity=per_token_head --output {to} && ptq report {to}"
        )
    return "\n".join(lines)


def _measured(report: Path) -> tuple[float, float, int] | None:
    """KL with everything quantized and with all but the cache, and on how many sequences."""
    try:
        found = json.loads(report.read_bytes())["attribution"]
        return float(found["whole"]), float(found["float_cache"]), int(found["sequences"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or of a run that did not measure it
        return None
