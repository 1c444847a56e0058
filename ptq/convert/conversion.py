"""What conversions share: the walk over a folder, the comparison with the source, surplus tensors.

Quantizing software adds tensors to a model that stand for nothing. AutoGPTQ and neural-compressor
give every layer a bias, of zeros where the model has none; neural-compressor saves a tied head
beside the embeddings that it is. Loaders refuse the former or warn of them, and the latter takes
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig

from formats.checkpoint.read import Checkpoint
from formats.checkpoint.write import CheckpointWriter
from formats.command import bar
from formats.errors import CheckpointError
from formats.families import block_layers
from formats.foreign.folder import owner
from formats.foreign.layout import used_groups
from formats.modeling.model import meta_model
from formats.scheme import Scheme, Strict
from formats.stored.weights import StoredWeight


class Source(Protocol):
    """A folder whose tensors are read one by one."""

    config: dict[str, Any]

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Read one tensor from its file."""
        ...


class Conversion(Strict):
    """What a conversion did.

    Attributes:
        modules: Quantized layers.
        scale_rounding: Largest relative difference of a scale from its source; of a weight where
            the target is a float model.
        rounded: Whether weights were rounded to integers.
        notes: What the reader of the new folder should know, each a sentence.
    """

    modules: int
    scale_rounding: float
    rounded: bool = False
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Destination:
    """Where a conversion writes.

    Attributes:
        out: Folder to make; for `gguf` a file.
        force: Whether an existing one may be replaced.
        shard_bytes: Most bytes of one weight file.
        progress: Whether to show a bar.
    """

    out: Path
    force: bool
    shard_bytes: int
    progress: bool

    def writer(
        self, config: Mapping[str, Any], scheme: Scheme, aux_files: Sequence[Path], **more: Any
    ) -> CheckpointWriter:
        """What makes a checkpoint of ours of it; arguments as of `CheckpointWriter`."""
        return CheckpointWriter(
            self.out,
            config=config,
            scheme=scheme,
            aux_files=aux_files,
            force=self.force,
            shard_bytes=self.shard_bytes,
            **more,
        )

    def layers(
        self,
        source: Source,
        modules: Sequence[str],
        add: Callable[[str, Tensor], None],
        without: Collection[str] = (),
    ) -> Iterator[str]:
        """Quantized layers, each to be converted in its turn; all else is copied.

        Args:
            add: Writes a tensor.
            without: Names of tensors that are not copied.
        """
        for name, module in parts(source, modules, "Converting", self.progress):
            if module is not None:
                yield module
            elif name not in without:
                add(name, source.tensor(name))


def unquantized(source: Checkpoint, modules: Sequence[str]) -> tuple[str, ...]:
    """Linear layers left alone: full names of the other matrices, without embeddings."""
    taken = {f"{module}.weight" for module in modules}
    return tuple(
        name.removesuffix(".weight")
        for name in source.names()
        if name.endswith(".weight")
        and name not in taken
        and len(source.shape(name)) == 2
        and "embed" not in name
    )


def parts(
    source: Source, modules: Sequence[str], title: str, progress: bool
) -> Iterator[tuple[str, str | None]]:
    """Tensors to copy, with None, and each quantized layer once, with its name."""
    quantized, seen = set(modules), set()
    for name in bar(source.names(), title=title, unit="tensor", shown=progress):
        module = owner(name, quantized)
        if module is None or name == f"{module}.bias":
            yield name, None
        elif module not in seen:
            seen.add(module)
            yield name, module


def verify(folder: Path, source: Checkpoint, progress: bool) -> float:
    """Compare what was written with its source; returns the scales' largest relative rounding."""
    written, rounding = Checkpoint.open(folder), 0.0
    if written.quantized_modules != source.quantized_modules:
        raise CheckpointError(f"{folder}: other layers were written than there are; write again")
    for name, module in parts(source, source.quantized_modules, "Verifying", progress):
        if module is None:
            require_same(name, source.tensor(name), written.tensor(name))
        else:
            new = written.weight(module)
            rounding = max(rounding, compare(module, source.weight(module), new))
    return rounding


def compare(module: str, old: StoredWeight, new: StoredWeight) -> float:
    """Refuse other integers; returns the largest relative difference of the scales."""
    require_same(f"{module}: weight", old.q, new.q)
    require_same(f"{module}: zero points", old.zeros, new.zeros)
    if torch.equal(old.scale, new.scale):
        return 0.0
    used = used_groups(old)
    ratio = ((new.scale - old.scale).abs() / old.scale)[used]
    return ratio.max().item() if ratio.numel() else 0.0


def require_same(name: str, old: Tensor, new: Tensor) -> None:
    """Refuse tensors that differ in type, shape or any bit."""
    same = (old.dtype, old.shape) == (new.dtype, new.shape)
    if not same or not torch.equal(_bytes(old), _bytes(new)):
        raise CheckpointError(f"{name} was read back with other bits; check the disk")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


HEAD, EMBEDDINGS = f"{block_layers.HEAD}.weight", f"{block_layers.EMBEDDING}.weight"


def surplus_tensors(source: Source, modules: Sequence[str]) -> frozenset[str]:
    """Names of the tensors to leave out when a folder is converted.

    Args:
        modules: Full names of its quantized layers.

    Raises:
        CheckpointError: there may be some, but transformers does not know the architecture.
    """
    return _made_up_biases(source, modules) | _tied_head(source)


def _made_up_biases(source: Source, modules: Sequence[str]) -> frozenset[str]:
    """Biases of nothing but zeros, of layers that have none in the model's architecture."""
    biases = sorted({f"{module}.bias" for module in modules} & set(source.names()))
    zero = [name for name in biases if not bool(source.tensor(name).any())]
    if not zero:
        return frozenset()
    try:
        own = meta_model(AutoConfig.for_model(**source.config)).state_dict()
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise CheckpointError(
            f"config.json: transformers makes no model of it ({' '.join(str(error).split())}), "
            f"which must tell whether {zero[0]} belongs there. Correct config.json"
        ) from error
    return frozenset(zero) - own.keys()


def _tied_head(source: Source) -> frozenset[str]:
    """The head, where the configuration says that it is the embeddings, and it is."""
    if not source.config.get("tie_word_embeddings") or not {HEAD, EMBEDDINGS} <= set(
        source.names()
    ):
        return frozenset()
    same = torch.equal(source.tensor(HEAD), source.tensor(EMBEDDINGS))
    return frozenset({HEAD} if same else ())
