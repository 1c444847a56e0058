"""LoRA adapters as PEFT saves them, checked against their base and moved to where it is.

    adapter_config.json          `formats.adapters.settings`
    adapter_model.safetensors    base_model.model.X.lora_A.weight [r, K] and lora_B.weight [N, r] of
                                 each linear layer X [N, K] that has an adapter

A layer with one gives y + s B A x. Of a base whose inputs and outputs were divided by factors when
it was quantized (`formats.adapters.factors`), A diag(d_in) and diag(1 / d_out) B stand for A and B.
An adapter that was trained on the quantized folder itself is left as it is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from formats.adapters.factors import AdapterFactors, read_factors
from formats.adapters.settings import AGAIN, MERGE, LoraSettings, adapter_folder, read_lora_settings
from formats.adapters.targets import Base
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.files import find_file
from formats.residual_rotation import rotation_seeds
from formats.stored.safetensors_files import SafetensorsFile

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ROTATED = "the method rotation turned its residual stream, and adapters read and write that"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_KINDS = {"lora_embedding": "of an embedding", "lora_magnitude": "of DoRA", ".bias": "a bias"}
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
    path = Path(name).expanduser()
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
            kind = next((f" ({what})" for part, what in _KINDS.items() if part in name), "")
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
