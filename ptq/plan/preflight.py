"""What is looked for before a run: each check gives the problems that it finds.

Nothing here reads a weight: shapes come from the headers of the checkpoint's files and from
transformers' own modelling code on the meta device.

A recipe's peers are checked, too: interpreters and packages that are not there.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PretrainedConfig

from calibrate.data import TokenSet, load_tokens
from calibrate.spec import SplitSpec
from formats.cache_scheme import CacheRole, KVCacheSpec
from formats.checkpoint.read import Checkpoint
from formats.checkpoint.targets import is_ignored
from formats.errors import CheckpointError, EngineError, suggestion, typed
from formats.families.block_layers import HEAD
from formats.families.registry import MODEL_TYPES, find_family, is_causal_lm, unsupported
from formats.gguf.metadata import model_metadata, require_writer, tokenizer_metadata
from formats.modeling.layers import (
    attention_names,
    attention_of_blocks,
    cached_of_blocks,
    head_name,
    positions_of,
    stored_names,
    structure_of,
    tied_names,
)
from formats.scheme import LayerScheme
from formats.stored.weights import needed_leaves, scale_shape, storage_format
from formats.tokenizer import VOCABULARIES, has_tokenizer, load_tokenizer
from ptq.methods.common.float_model import FloatModel, config_of, seen_as_floats
from ptq.output import is_taken, kept_bytes
from ptq.plan.modules import shared_embedding
from ptq.recipe.peers import PeerChoice
from ptq.recipe.problems import Faults, Where
from ptq.recipe.schema import Recipe
from ptq.recipe.strict_yaml import Key

MODEL: Key = ("model", "path")
ADAPTER: Key = ("model", "adapter")
ENTRY = 90  # bytes of a tensor in the header of its file, at most, without its name


def read_config(checkpoint: Checkpoint, where: Where) -> PretrainedConfig:
    """The model's configuration.

    Raises:
        RecipeError: of another family than those supported, quantized already, or not valid.
    """
    refused = _refused(checkpoint)
    faults = [] if refused is None else [refused]
    if seen_as_floats(checkpoint) is checkpoint and checkpoint.scheme.quantizes_anything:
        faults.append(
            f"{checkpoint.path} is quantized already ({checkpoint.scheme.wac}); give the original "
            "model in FP16, BF16 or FP32, or what "
            f"{typed('convert', checkpoint.path, 'FLOAT', '--to', 'float')} makes of it"
        )
    if faults:
        raise where.error((MODEL, fault) for fault in faults)
    try:
        return config_of(checkpoint)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        fault = f"{checkpoint.path / 'config.json'} is not a valid configuration: {reason}"
        raise where.error([(MODEL, fault)]) from error


def _refused(checkpoint: Checkpoint) -> str | None:
    """Why a model is none that is run here; None where it is."""
    config = checkpoint.config
    if find_family(config) is not None:
        return None
    if not is_causal_lm(config):
        return unsupported(config, str(checkpoint.path))
    try:
        structure_of(config)
    except CheckpointError as error:
        return f"{checkpoint.path}: {error}"
    return None


def check_declared(recipe: Recipe, config: Mapping[str, Any]) -> Faults:
    """Methods that need a declaration of the model's family, where there is none."""
    for i, method in enumerate(recipe.methods):
        if method.needs_declaration and find_family(config) is None:
            yield (
                ("methods", i),
                f"{method.name} must know what each layer is, and no family declares "
                f"{config.get('model_type')!r}; leave it out. Declared are "
                f"{', '.join(MODEL_TYPES)}",
            )


def check_tensors(checkpoint: FloatModel, model: nn.Module) -> Faults:
    """Tensors that the configuration asks for and the files do not have, or have otherwise; and
    biases, not all zero, of layers that have none by it.
    """
    stored, tied = stored_names(checkpoint.config), tied_names(checkpoint.config)
    missing, misshaped, state = [], [], model.state_dict()
    for code, tensor in state.items():
        name = stored.get(code, code)
        bias = f"{name.removesuffix('weight')}bias"
        unknown = f"{code.removesuffix('weight')}bias" not in state and bias in checkpoint
        if unknown and checkpoint.tensor(bias).any():
            misshaped.append(f"{bias} is there, needed is none")
        if name not in checkpoint:
            missing += [] if name in tied else [name]
        elif checkpoint.shape(name) != tuple(tensor.shape):
            shapes = f"{list(checkpoint.shape(name))}, needed is {list(tensor.shape)}"
            misshaped.append(f"{name} is {shapes}")
        elif tensor.is_floating_point() and not checkpoint.dtype(name).is_floating_point:
            misshaped.append(f"{name} is {checkpoint.dtype(name)}, needed is a floating point type")
    for names, verb in ((missing, "misses "), (misshaped, "does not fit its config.json: ")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield MODEL, f"{checkpoint.path} {verb}{'; '.join(names[:3])}{more}"


def check_tokenizer(checkpoint: Checkpoint, config: PretrainedConfig) -> Faults:
    """A tokenizer that is missing, damaged or larger than the model's vocabulary."""
    folder, vocabulary = checkpoint.path, config.get_text_config().vocab_size
    if not has_tokenizer(folder):
        files = ", ".join(VOCABULARIES)
        yield MODEL, f"{folder} has no tokenizer; needed is one of {files} beside the weights"
        return
    try:
        size = len(load_tokenizer(folder))
    except CheckpointError as error:
        yield MODEL, str(error)
        return
    if size > vocabulary:
        yield (
            MODEL,
            f"the tokenizer of {folder} has {size} tokens, the model a vocabulary of {vocabulary}; "
            "they do not belong together",
        )


def check_data(recipe: Recipe) -> Faults:
    """Local files of data that are not there."""
    for field in ("name", "evaluation_name"):
        source = getattr(recipe.dataset, field)
        if source is not None and Path(source).is_absolute() and not Path(source).exists():
            yield ("dataset", field), f"no such file: {source}"


def read_data(recipe: Recipe) -> dict[str, TokenSet]:
    """Tokens of both splits, so that a fault of the evaluation data shows before calibration.

    Raises:
        RecipeError: a source is missing, empty, unreadable or too short.
    """
    tokenizer = load_tokenizer(recipe.model.folder)
    return {
        "calibration": load_tokens(recipe.dataset, tokenizer, "calibration"),
        "evaluation": load_tokens(recipe.dataset, tokenizer, "evaluation"),
    }


def describe_data(recipe: Recipe, data: Mapping[str, TokenSet]) -> Iterator[str]:
    """What a person should know of the data, a line each: what was taken, and what speaks against
    it; and which split has fewer samples than were asked for, which `fewer` allows.
    """
    notes = ((tokens.source, note) for tokens in data.values() for note in tokens.notes)
    yield from (f"{source}: {note}" for source, note in dict.fromkeys(notes))
    yield from (f"careful: {tokens.warning}" for tokens in data.values() if tokens.warning)
    for split, tokens in data.items():
        wanted: SplitSpec = getattr(recipe.dataset, split)
        if len(tokens.ids) < wanted.samples:
            yield (
                f"{split}: {tokens.source} gives {len(tokens.ids)} x {tokens.ids.shape[1]} tokens; "
                f"asked for were {wanted.samples} x {wanted.sequence_length}"
            )


def check_lengths(recipe: Recipe, config: PretrainedConfig) -> Faults:
    """Sequences that are longer than the model's positions."""
    if not attention_names(config.to_dict()):
        return  # nothing counts positions
    most = positions_of(config)
    for split in ("calibration", "evaluation"):
        length = getattr(recipe.dataset, split).sequence_length
        if length > most:
            message = f"found {length}; the model has {most} positions"
            yield ("dataset", split, "sequence_length"), message
    speed = recipe.report.speed
    if speed is not None and speed.prompt_tokens + speed.new_tokens > most:
        total = f"{speed.prompt_tokens} prompt and {speed.new_tokens} new tokens"
        yield ("report", "speed"), f"found {total}; the model has {most} positions"


def with_named_head(recipe: Recipe, config: Mapping[str, Any]) -> Recipe:
    """A recipe that calls the head by the model's own name in `ignore` and `layers`.

    Some families (GPT-NeoX) call the layer that gives logits otherwise.
    """
    own = head_name(config)
    ignore = tuple(own if entry == HEAD else entry for entry in recipe.ignore)
    layers = tuple(
        part.model_copy(update={"match": tuple(own if e == HEAD else e for e in part.match)})
        for part in recipe.layers
    )
    return recipe.model_copy(update={"ignore": ignore, "layers": layers})


def check_patterns(
    recipe: Recipe, linears: Mapping[str, object], quantized: Collection[str]
) -> Faults:
    """Entries of `ignore` and patterns of `layers` that match no linear layer.

    Those of `layers` must match one that is quantized, too.
    """
    for i, layers in enumerate(recipe.layers):
        for j, entry in enumerate(layers.match):
            key, matched = ("layers", i, "match", j), [n for n in linears if is_ignored(n, [entry])]
            if not matched:
                yield key, f"{entry!r} matches no linear layer; {_nearest(entry, linears)}"
            elif not any(name in quantized for name in matched):
                yield (
                    key,
                    f"{entry!r} matches only layers that stay in float, such as {matched[0]}; "
                    "leave it out, or ignore fewer",
                )
    for i, entry in enumerate(recipe.ignore):
        if not any(is_ignored(name, [entry]) for name in linears):
            yield ("ignore", i), f"{entry!r} matches no linear layer; {_nearest(entry, linears)}"


def _nearest(entry: str, linears: Mapping[str, object]) -> str:
    """What the writer of a pattern may have meant."""
    text = re.sub(r"[^\w.]|\.(?=[*+?$])", "", entry.removeprefix("re:")).strip(".")
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in linears))
    by_name = suggestion(text, list(linears)).partition("allowed: ")[0]
    if "layers" in text and by_name:
        return f"{by_name}A full name is needed, or `re:` and a pattern for its start"
    by_kind = suggestion(text.rpartition(".")[2], [f"re:.*{kind}" for kind in kinds])
    return f"{by_kind} (a full name, or `re:` and a pattern for its start)"


def check_output(recipe: Recipe, needed: int, force: bool) -> Faults:
    """An output folder that is taken, holds the model, or is on a disk that is too small."""
    key, path = ("output", "path"), recipe.output.path
    if path.exists() and not path.is_dir():
        yield key, f"{path} is a file; give a folder with --output"
    elif recipe.model.folder.resolve().is_relative_to(path.resolve()):
        yield key, f"{path} holds the model itself; give another --output"
    elif is_taken(path) and not force:
        replace = "give --force (in Python force=True) to replace it, or another --output"
        yield key, f"{path} exists already; {replace}"
    parent = next(folder for folder in (path, *path.parents) if folder.is_dir())
    free = shutil.disk_usage(parent).free
    needed -= kept_bytes(path)  # by a run that was stopped: this one goes on with it, or removes it
    if free < needed:
        yield key, f"needs about {needed / 1e6:.0f} MB; {parent} has {free / 1e6:.0f} MB free"


def check_gguf(recipe: Recipe, checkpoint: Checkpoint) -> Faults:
    """A model that no .gguf file is written of, where the recipe asks for one."""
    if recipe.output.format != "gguf":
        return
    try:
        require_writer()
        model_metadata(checkpoint.config)
        tokenizer_metadata(checkpoint.path, checkpoint.config["vocab_size"])
    except CheckpointError as error:
        yield ("output", "format"), str(error)


def predict_checkpoint(
    checkpoint: FloatModel,
    quantized: Mapping[str, LayerScheme],
    caches: Sequence[KVCacheSpec | None],
) -> int:
    """Bytes of the weight files that will be written, with scales and headers.

    A quantized layer [out, in] takes its bits an element, its scales and zero points, and an fp32
    scale for a static input; all else keeps its type. A static cache takes fp32 scales, and one
    whose keys are centred the numbers that are subtracted.

    Args:
        checkpoint: The float model.
        quantized: Schemes of quantized layers by full name.
        caches: How the cache of each block is quantized.
    """
    total, written, shared = 0, list[str](), shared_embedding(checkpoint, quantized)
    for name in checkpoint.names():
        shape, dtype = checkpoint.shape(name), checkpoint.dtype(name)
        module, _, leaf = name.rpartition(".")
        module = head_name(checkpoint.config) if name == shared else module
        scheme = quantized.get(module)
        if scheme is not None and leaf == "weight":
            total += weight_bytes(scheme, (shape[0], shape[1]), dtype)
            leaves = [*needed_leaves(scheme), *["input_scale"] * scheme.static_input]
            written += [f"{module}.{own}" for own in leaves]
        else:
            total += math.prod(shape) * dtype.itemsize
            written.append(name)
    config = checkpoint.config
    cached = zip(attention_of_blocks(config), cached_of_blocks(config), caches, strict=True)
    for attention, own, spec in cached:
        if spec is None or own is None:
            continue
        sizes: dict[CacheRole, int] = {"k_cache": own.k, "v_cache": own.v}
        for role, size in () if spec.dynamic else sizes.items():
            total += 4 * math.prod(spec.scale_shape(role, own.heads, size, latent=own.latent))
            written.append(f"{attention}.{role}")
        total += 4 * own.heads * own.k if spec.center_keys else 0
        total += 4 * own.heads * own.k**2 if spec.compensate_keys else 0
    return total + header_bytes(written)


def header_bytes(names: Iterable[str]) -> int:
    """Bytes that tensors of these names take at most in the headers of their files."""
    return sum(len(name) + ENTRY for name in names)


def weight_bytes(scheme: LayerScheme, shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Bytes of a quantized layer [out, in], without its bias, for a model in `dtype`."""
    assert scheme.weights is not None
    spec, scales = scheme.weights, math.prod(scale_shape(scheme.weights, shape))
    if spec.scale_type != "float":
        return math.prod(shape) * spec.bits // 8 + scales + 4 * (spec.scale_type == "e4m3")
    packed = storage_format(scheme) == "pack-quantized"
    total = math.prod(shape) * spec.bits // 8 + scales * (
        dtype.itemsize if packed and not spec.super_blocks else 4
    )
    total += 16 if packed else 0  # its shape
    total += 0 if spec.symmetric else scales * (32 if spec.float_zeros else spec.bits) // 8
    return total + (4 if scheme.static_input else 0)


def check_peers(recipe: Recipe) -> Faults:
    """Peers that could not run, each with the command that makes them."""
    for i, choice in enumerate(recipe.report.peers):
        try:
            missing = choice.spec.missing(choice.interpreter)
        except EngineError as error:
            yield (
                ("report", "peers", i, "python"),
                f"{error}; give the path of the interpreter of an environment that has "
                f"{choice.spec.package}",
            )
            continue
        if missing:
            yield ("report", "peers", i), _advice(choice, missing)


def _advice(choice: PeerChoice, missing: list[str]) -> str:
    lacks = f"{choice.name} needs {', '.join(missing)}, which {choice.interpreter} does not have"
    if choice.python is not None:
        return f"{lacks}; install with `{choice.python} -m pip install {' '.join(missing)}`"
    if choice.spec.in_extra:
        return f"{lacks}; install with `pip install 'ptq[peers]'`"
    needed = " ".join(choice.spec.distributions)
    return (
        f"{lacks}. It pins other versions than this project; make an environment for it with "
        f"`python -m venv peer && peer/bin/python -m pip install {needed}`, and give "
        f"`{{name: {choice.name}, python: peer/bin/python}}`"
    )
