"""vLLM in the place of this engine: what it can take of a checkpoint, and how it is started.

vLLM refuses some things late and in other words, and takes others in another sense than this
engine, silently. `check_vllm` says both before it starts; its statements hold for vLLM 0.32 and
0.33: their readers of `quantization_config`, and what their CPU build did.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from formats.cache_scheme import KEYS_MOVED, KVCacheSpec
from formats.errors import RequestError, typed
from formats.families.registry import read_table
from formats.namespace import ROOT
from formats.stored.folder import ConfigFile, read_config
from inference.server.arguments import parser

REPORT = Path("report/report.json")  # beside the checkpoint's folder, in the output of its run
BLOCK = 128  # of weights in blocks
TIED = "tied_"  # before the strategy of a head whose integers are the embedding's
SERVE = ["-m", "vllm.entrypoints.cli.main", "serve"]  # what the command `vllm serve` runs
THEIR_KEY = "VLLM_API_KEY"  # in the environment, which other users cannot read
FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
INSTALL = (
    "It pins its own torch, so install it in an environment of its own: `python -m venv "
    "/envs/vllm && /envs/vllm/bin/pip install vllm`, and give --engine vllm=/envs/vllm/bin/python"
)
CONTROL_TOKENS = (
    "chats: vLLM makes control tokens of those that messages spell, as this engine does by "
    "--special-tokens-in-content alone."
)
BOTH = frozenset(  # what `ptq serve` itself does of its options, before vLLM starts
    "checkpoint engine quiet revision api_key api_key_file special_tokens_in_content".split()
)
BY_VLLM = {"mxfp8": "mxfp8-quantized", "mxfp4": "mxfp4-pack-quantized"}


@dataclass(frozen=True)
class Shards:
    """Over how many GPUs vLLM is to spread a model.

    Attributes:
        pipeline: Groups of them that each hold a part of the layers.
    """

    tensor: int = 1
    pipeline: int = 1


def start_vllm(
    arguments: argparse.Namespace, folder: Path, key: str | None, further: Sequence[str]
) -> NoReturn:
    """Check a checkpoint, print what differs, and become vLLM's server, which then has all signals.

    Args:
        arguments: Of `ptq serve`.
        key: What clients have to show, or None.
        further: Options of `vllm serve`, passed on as they are.

    Raises:
        RequestError: vLLM is not installed or cannot serve the checkpoint, or an option is of this
            engine's server.
    """
    default_of = parser().get_default
    ours = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(arguments).items()
        if name not in BOTH and value != default_of(name)
    ]
    if ours:
        raise RequestError(
            f"--engine vllm does not take {', '.join(ours)}: these are options of this engine. "
            "Those of `vllm serve` follow `--`, such as `-- --port 8001 --tensor-parallel-size 2`"
        )
    python = arguments.engine[1] or sys.executable
    command = [python, *SERVE, str(folder), *further]
    if not any(word.partition("=")[0] == "--served-model-name" for word in further):
        command += ["--served-model-name", str(arguments.checkpoint)]
    notes = check_vllm(folder, shards_of(further))
    if not arguments.special_tokens_in_content:
        notes = [*notes, CONTROL_TOKENS]
    require_vllm(python)
    if not arguments.quiet:
        for note in notes:
            print(f"  - {note}")
        print(f"starting {shlex.join(command)}")
    sys.stdout.flush()
    os.execve(python, command, _environment(key))


def shards_of(further: Sequence[str]) -> Shards:
    """How options of `vllm serve` spread a model.

    Raises:
        RequestError: a number of GPUs is none.
    """
    options = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    options.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    options.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    try:
        found, _ = options.parse_known_args(further)
    except argparse.ArgumentError as error:
        raise RequestError(f"options of vLLM: {error}") from error
    return Shards(found.tensor_parallel_size, found.pipeline_parallel_size)


def _environment(key: str | None) -> dict[str, str]:
    """Ours with the key, and without our packages, whose names would hide others."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in paths if path and Path(path).resolve() != ROOT]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(others), "PYTHONSAFEPATH": "1"}
    return found | ({} if key is None else {THEIR_KEY: key})


def require_vllm(python: str) -> None:
    """Check that an interpreter has vLLM; without loading it, which takes seconds.

    Raises:
        RequestError: it has not, or is none.
    """
    try:
        found = subprocess.run([python, "-c", FIND], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RequestError(f"--engine vllm={python}: it does not run ({error})") from error
    if found.returncode:
        raise RequestError(f"--engine vllm: {python} has no vLLM. {INSTALL}")


def check_vllm(folder: Path, shards: Shards) -> list[str]:
    """What differs where vLLM serves a checkpoint, a sentence or more each.

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
        yield f"it has {layers} layers, too few for --pipeline-parallel-size {shards.pipeline}"
    if ranks == 1 or not isinstance(heads, int):
        return
    if heads % ranks:
        option = f"--tensor-parallel-size {ranks}"
        yield f"it has {heads} attention heads, which {option} does not divide"
    head_size = model.get("head_dim") or model.get("hidden_size", 0) // heads
    inputs = {"o_proj": heads * head_size, "down_proj": model.get("intermediate_size")}
    weights = [_weights(group) for group in _groups(config)]  # blocks share scales as groups do
    sizes = {BLOCK if w.get("strategy") == "block" else w.get("group_size") for w in weights}
    for size in sizes - {None}:
        for name, width in inputs.items():
            if isinstance(width, int) and (width % ranks or width // ranks % (size or 1)):
                yield (
                    f"{name} has {width} inputs with a scale for every {size}, and "
                    f"--tensor-parallel-size {ranks} would cut through a group; take fewer GPUs, "
                    "--pipeline-parallel-size, or smaller groups"
                )


def _weights(group: Mapping[str, Any]) -> Mapping[str, Any]:
    return group.get("weights") or {}


def _of_family(config: ConfigFile) -> Iterator[str]:
    listed = {row["family"]: row["vLLM"] for row in read_table()}
    family = str((config.published or config.model).get("model_type"))
    if listed.get(family) == "no":
        yield f"model: vLLM 0.33 does not list {family!r}; a newer one may."
    elif listed.get(family) == "transformers":
        yield f"model: vLLM runs {family!r} by transformers' code, slower than models of its own."


def _of_inputs(config: ConfigFile) -> Iterator[str]:
    """Scales that are not read there, and formats whose inputs are float here alone."""
    read = [group.get("input_activations") or {} for group in _groups(config)]
    sinks = 0 if config.own is None else config.own.sink_tokens
    if sinks and any(inputs.get("dynamic") is False for inputs in read):
        yield (
            f"inputs: the first tokens of a sequence ({sinks}) have static scales of their own, "
            "which vLLM does not read: it clips them to those of other tokens, and all later "
            "tokens read what that does. Quantize for it with `--set sinks.keep=none`, or with "
            "inputs scaled by token."
        )
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
    measured = _measured(output / REPORT)
    if measured is not None:
        whole, alone, sequences = measured
        yield (
            f"accuracy: the KL divergence to the original is {alone:.4f} nats with a float cache, "
            f"and {whole:.4f} with the checkpoint's own ({sequences} sequences of its evaluation)."
        )
    else:
        yield (
            "accuracy: no report of this checkpoint tells it with a float cache. "
            f"{typed('report', output)} measures it, where that is the output of its run."
        )
    yield (
        "memory: `-- --kv-cache-dtype int8_per_token_head` (or fp8_per_token_head) caches in 8 "
        "bits with scales of each token, where vLLM's attention has it. What that loses is told by"
        f"\n{_solving(output, [*named.values()])}"
    )


def _solving(output: Path, caches: Sequence[KVCacheSpec]) -> str:
    """The commands that measure a run's checkpoint with the caches that vLLM has.

    These have keys and values of one type, as they are: what the checkpoint's do is switched off.
    """
    ours = {"value_dtype": "null"} | dict.fromkeys(KEYS_MOVED, "false")
    off = [
        f" --set scheme.kv_cache.{name}={value}"
        for name, value in ours.items()
        if any(getattr(cache, name) for cache in caches)
    ]
    lines = []
    for dtype in ("int8", "fp8_e4m3"):
        to = shlex.quote(f"{output}_{dtype}_token")
        lines.append(
            f"      ptq solve {shlex.quote(str(output))} --set scheme.kv_cache.dtype={dtype} --set "
            f"scheme.kv_cache.granularity=per_token_head{''.join(off)} --output {to} "
            f"&& ptq report {to}"
        )
    return "\n".join(lines)


def _measured(report: Path) -> tuple[float, float, int] | None:
    """KL with everything quantized and with all but the cache, and on how many sequences."""
    try:
        found = json.loads(report.read_bytes())["attribution"]
        return float(found["whole"]), float(found["float_cache"]), int(found["sequences"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or of a run that did not measure it
        return None
