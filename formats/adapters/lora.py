"""LoRA adapters as PEFT saves them, checked against their base and moved to where it is.

    adapter_config.json          `formats.adapters.settings`
    adapter_model.safetensors    base_model.model.X.lora_A.weight [r, K] and lora_B.weight [N, r] of
                                 each linear layer X [N, K] that has an adapter

A layer with one gives y + s B A x. Of a base whose inputs and outputs were divided by factors when
it was quantized (`formats.adapters.factors`), A diag(d_in) and diag(1 / d_out) B stand for A and B.
An adapter that was trained on the quantized folder itself is left as it is.

PEFT names the modules of transformers' code. Those that a family stores merged (Phi-3's qkv_proj)
are the layers that they hold here: each gets its rows of B, and A whole.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from formats.adapters.factors import AdapterFactors, read_factors
from formats.adapters.settings import AGAIN, MERGE, LoraSettings, adapter_folder, read_lora_settings
from formats.checkpoint.join import MergedLayers
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families import block_layers
from formats.families.registry import predicting_layer
from formats.files import find_file
from formats.modeling.layers import (
    embedding_name,
    head_name,
    quantizable_of,
    routers_of,
    stored_names,
)
from formats.residual_rotation import rotation_seeds
from formats.stored.safetensors_files import SafetensorsFile

LEAVES = ("weight", "weight_packed")
LEVEL = "model."


@dataclass(frozen=True)
class Base:
    """The layers of a checkpoint that adapters run on."""

    checkpoint: Checkpoint

    @cached_property
    def layers(self) -> Mapping[str, tuple[str, ...]]:
        """Full names of layers as `Checkpoint` has them, in their order, by PEFT's name."""
        config = self.checkpoint.config
        code = {stored: name for name, stored in stored_names(config).items()}
        merged, found = MergedLayers(config), {}
        for module in self._linears:
            stored = merged.stored_name(module)
            name = code.get(f"{stored}.weight", f"{stored}.weight").removesuffix(".weight")
            found[name] = merged.parts_of(stored)
        return found

    @cached_property
    def _linears(self) -> set[str]:
        """Full names of single layers: of blocks, of no expert, with an input of their own."""
        quantizable = quantizable_of(self.checkpoint.config)
        return {m for m in self._modules if quantizable(m) and self._why_not(m) is None}

    @cached_property
    def _modules(self) -> set[str]:
        parts = (name.rpartition(".") for name in self.checkpoint.names())
        return {module for module, _, leaf in parts if leaf in LEAVES}

    def shape(self, module: str) -> tuple[int, int]:
        """Outputs and inputs of a layer, by its name in `Checkpoint`."""
        outputs, inputs = self.checkpoint.weight_shape(module)
        return outputs, inputs

    def find(self, name: str, origin: str) -> str:
        """The name in `layers` of a module of an adapter, with or without its first level.

        Args:
            name: PEFT's.

        Raises:
            CheckpointError: adapters do not run on it, or the base has none of that name.
        """
        candidates = (name, f"{LEVEL}{name}", name.removeprefix(LEVEL))
        found = next((own for own in candidates if own in self.layers), None)
        if found is None:
            raise CheckpointError(f"{origin}: {name} {self._refusal(candidates)}")
        return found

    def _refusal(self, candidates: tuple[str, ...]) -> str:
        path = self.checkpoint.path
        kinds = (self._why_not(name) for name in candidates)
        kind = next((why for why in kinds if why is not None), None)
        if kind is None and self._modules.isdisjoint(candidates):
            return (
                f"is not among the layers of {path}, so that this adapter is of another base. Give "
                "the base that it was trained on"
            )
        return (
            f"is {kind or 'no linear layer of a block'}, on which adapters do not run; they run on "
            f"the linear layers of attention and of dense feed-forward layers. {MERGE}"
        )

    def _why_not(self, module: str) -> str | None:
        """What a module is that no adapter runs on; None of all others."""
        config = self.checkpoint.config
        if module == head_name(config):
            return "the LM head"
        if module == embedding_name(config):
            return "the embedding"
        if routers_of(config)(module):
            return "a router of a mixture of experts"
        if ".experts." in f"{module}." or block_layers.is_shared_expert(f"{module}."):
            return "an expert of a mixture"
        if block_layers.is_weight_only(module):
            return "a projection that is multiplied with queries and results, and has no input"
        if predicting_layer(config, module) is not None:
            return "a part of a layer that predicts further tokens"
        return None


WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ROTATED = "the method rotation turned its residual stream, and adapters read and write that"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_KINDS = (
    ("lora_embedding", "of an embedding"),
    ("lora_magnitude", "of DoRA"),
    (r"\.bias$", "a bias"),
    (r"^(?!.*\.lora_).*\.weight$", "a weight of the base itself, saved beside the adapter"),
)
log = logging.getLogger("ptq.formats")


@dataclass(frozen=True)
class LoraWeights:
    """Of one linear layer [N, K].

    Attributes:
        a: fp32 [r, K].
        b: fp32 [N, r]; s is multiplied in.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Lora:
    """An adapter, for one checkpoint.

    Attributes:
        rank: The largest r.
        modules: By the full name of a linear layer as `Checkpoint` has it.
    """

    path: Path
    rank: int
    modules: Mapping[str, LoraWeights]

    def merged(self, module: str, weight: Tensor) -> Tensor:
        """A layer's weight with what the adapter adds, W + s B A: fp32 [N, K].

        Args:
            module: Full name; without an adapter, the weight is as it was.
            weight: Of floats [N, K], on the CPU.
        """
        own = self.modules.get(module)
        return weight.float() if own is None else weight.float() + own.b @ own.a

    def merged_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """A float tensor by its full name, in its own type, with what the adapter adds."""
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or module not in self.modules:
            return tensor
        return self.merged(module, tensor).to(tensor.dtype)


def read_lora(path: str | Path, checkpoint: Checkpoint) -> Lora:
    """Read an adapter for a checkpoint, which is its base or was quantized from it.

    Args:
        path: The adapter's folder, or its name on the hub.
        checkpoint: What it is to run on, or to be merged into.

    Raises:
        CheckpointError: it is damaged, of a kind that is not run here, or of another base, or
            cannot follow what was done to the base; what is wrong is named.
    """
    folder = adapter_folder(path)
    settings, file = read_lora_settings(folder), open_weights(folder)
    factors = factors_for(folder, settings.base_model_name_or_path, checkpoint)
    base = Base(checkpoint)
    pairs = _pairs(file, folder)
    found = {base.find(name, str(folder)): name for name in pairs}
    if len(found) < len(pairs):
        twice = next(name for name in pairs if name not in found.values())
        raise CheckpointError(f"{folder}: {twice} is there under two names. {AGAIN}")
    _check_targets(settings, base, found, folder)
    modules: dict[str, LoraWeights] = {}
    for stored, name in found.items():
        a, b = _read(file, name, settings, base, stored)
        modules |= _split(a, b, base, stored, factors)
    for module, own in modules.items():
        if not bool(torch.isfinite(own.a).all() and torch.isfinite(own.b).all()):
            raise CheckpointError(
                f"{folder}: the adapter of {module} holds NaN or infinity. {AGAIN}"
            )
    return Lora(folder, max(len(own.a) for own in modules.values()), modules)


def open_weights(folder: Path) -> SafetensorsFile:
    """The tensors of an adapter.

    Raises:
        CheckpointError: there are none, or they are pickled or damaged.
    """
    path = find_file(folder, WEIGHTS)
    if path is not None:
        return SafetensorsFile(path)
    if find_file(folder, PICKLE) is not None:
        raise CheckpointError(
            f"{folder}: found {PICKLE}, pickled weights, which can run any code when they are read "
            "and are refused. Where you trust it, load it in PEFT and save it again with "
            "save_pretrained(..., safe_serialization=True)"
        )
    raise CheckpointError(f"{folder}: found no {WEIGHTS}. {AGAIN}")


def factors_for(folder: Path, trained_on: str | None, checkpoint: Checkpoint) -> AdapterFactors:
    """What an adapter has to follow; nothing where it was trained on the checkpoint itself.

    Args:
        trained_on: Its base, as its settings name it.
        checkpoint: What it is to run on.

    Raises:
        CheckpointError: it cannot.
    """
    if trained_on and _is_folder(trained_on, checkpoint.path):
        return AdapterFactors()
    _warn_of_another(folder, trained_on, checkpoint)
    factors = read_factors(checkpoint.path)
    reason = factors.unmovable or (ROTATED if rotation_seeds(checkpoint.config) else None)
    if reason is not None:
        raise CheckpointError(
            f"{folder}: an adapter of the original model does not fit {checkpoint.path}: {reason}. "
            "Quantize the model without that method, or with the adapter merged in: `ptq quantize "
            f"MODEL --adapter {folder}`"
        )
    return factors


def _is_folder(name: str, folder: Path) -> bool:
    path = Path(os.path.expanduser(name))
    return path.is_dir() and path.samefile(folder)


def _warn_of_another(folder: Path, trained_on: str | None, checkpoint: Checkpoint) -> None:
    known = _known_name(checkpoint)
    if trained_on and known and Path(trained_on).name != Path(known).name:
        message = "%s was trained on %s, and %s is %s: check that they are the same model"
        log.warning(message, folder, trained_on, checkpoint.path, known)


def _known_name(checkpoint: Checkpoint) -> str | None:
    """What a checkpoint's model is called: by its config.json, or in the hub's cache."""
    known = checkpoint.config.get("_name_or_path")
    if isinstance(known, str) and known:
        return known
    hub = (part for part in checkpoint.path.absolute().parts if part.startswith("models--"))
    return next((part.rpartition("--")[2] for part in hub), None)


def _pairs(file: SafetensorsFile, folder: Path) -> list[str]:
    """Names of the modules that the file has A and B of.

    Raises:
        CheckpointError: a tensor is missing or not expected.
    """
    found: dict[str, set[str]] = {}
    for name in file.tensors:
        match = _NAME.fullmatch(name)
        if match is None:
            kind = next((f" ({what})" for part, what in _KINDS if re.search(part, name)), "")
            raise CheckpointError(
                f"{folder}: {name}{kind} is not expected; {WEIGHTS} holds "
                f"base_model.model.X.lora_A.weight and lora_B.weight of linear layers X. {MERGE}"
            )
        found.setdefault(match[1], set()).add(match[2])
    for name, kinds in found.items():
        if len(kinds) == 1:
            here, missing = ("A", "B") if "A" in kinds else ("B", "A")
            raise CheckpointError(
                f"{folder}: {name} has lora_{here}.weight, and lora_{missing}.weight is missing. "
                f"{AGAIN}"
            )
    if not found:
        raise CheckpointError(f"{folder}: {WEIGHTS} holds no tensors. {AGAIN}")
    return list(found)


def _check_targets(
    settings: LoraSettings, base: Base, found: Mapping[str, str], folder: Path
) -> None:
    """Refuse layers that adapter_config.json does not name, and a lack of those that it does."""
    wanted = settings.targets(base.layers)
    if wanted is None:
        return
    extra = found.keys() - wanted
    if extra:
        raise CheckpointError(
            f"{folder}: {found[min(extra)]} has an adapter, and is none of target_modules "
            f"{settings.target_modules}. {AGAIN}"
        )
    missing = wanted - found.keys() if settings.of_all_blocks else set()
    if missing:
        raise CheckpointError(
            f"{folder}: {min(missing)}, one of target_modules {settings.target_modules}, has no "
            f"adapter in {WEIGHTS} ({len(missing)} of {len(wanted)} layers). {AGAIN}"
        )


def _read(
    file: SafetensorsFile, name: str, settings: LoraSettings, base: Base, stored: str
) -> tuple[Tensor, Tensor]:
    """A [r, K] and s B [N, r] of a module, fp64.

    Raises:
        CheckpointError: they are of another type or rank, or of a layer of another size.
    """
    a, b = (f"base_model.model.{name}.lora_{kind}.weight" for kind in "AB")
    folder, rank = file.path.parent, settings.rank(name)
    for tensor in (a, b):
        dtype, shape = file.tensors[tensor]
        if dtype not in FLOATS or len(shape) != 2:
            raise CheckpointError(
                f"{folder}: {tensor} is {dtype} {list(shape)}; needed is a matrix of float32, "
                f"float16 or bfloat16. {AGAIN}"
            )
    (rows, columns), (outputs, inner) = file.tensors[a][1], file.tensors[b][1]
    shapes = [base.shape(part) for part in base.layers[stored]]
    wanted = sum(n for n, _ in shapes), shapes[0][1]
    if (outputs, columns) != wanted:
        raise CheckpointError(
            f"{folder}: the adapter of {name} has {columns} inputs and {outputs} outputs, and the "
            f"layer of {base.checkpoint.path} has {wanted[1]} and {wanted[0]}: it is of another "
            "base. Give the base that it was trained on"
        )
    if (rows, inner) != (rank, rank):
        raise CheckpointError(
            f"{folder}: the adapter of {name} has rank {rows} in A and {inner} in B, and "
            f"adapter_config.json says {rank} (r, rank_pattern). {AGAIN}"
        )
    return file.tensor(a).double(), file.tensor(b).double() * settings.scale(name)


def _split(
    a: Tensor, b: Tensor, base: Base, stored: str, factors: AdapterFactors
) -> Iterator[tuple[str, LoraWeights]]:
    """The weights of each layer that a module of PEFT's is, moved."""
    first = 0
    for part in base.layers[stored]:
        rows, columns = base.shape(part)
        d_in, d_out = factors.divisors(part, (rows, columns))
        own = b[first : first + rows]
        yield part, LoraWeights((a * d_in).float(), (own / d_out[:, None]).float())
        first += rows
