"""A checkpoint folder in a foreign layout, and its layers as tensors of ours.

Nothing is converted when a folder is opened. A layer's tensors are read and unpacked when its
weight is asked for; scales and zero points are looked through before, as they tell whether the
weights are symmetric.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from formats.errors import CheckpointError, typed
from formats.families.block_layers import by_block
from formats.foreign.layout import Layout, named
from formats.foreign.settings import Kind, integer_weights, read_settings
from formats.modeling.layers import common_inputs
from formats.scheme import Scheme
from formats.stored.folder import read_config
from formats.stored.names import open_native
from formats.stored.safetensors_files import NamedTensors, StoredTensors
from formats.stored.weights import (
    Shape,
    StoredWeight,
    check_scale,
    check_scale_values,
    tensor_kinds,
    weight_tensors,
)

OF_CACHE = (".k_scale", ".v_scale")  # of some fp8 checkpoints: the cache is one of floats here
INPUT_SCALE = "input_scale"


def owner(name: str, modules: Collection[str]) -> str | None:
    """The one of some layers that a tensor belongs to: its name begins with the layer's."""
    prefixes = accumulate(name.split("."), "{}.{}".format)
    return next((prefix for prefix in prefixes if prefix in modules), None)


class ForeignFolder(NamedTensors):
    """A checkpoint folder whose weights are quantized in another layout than compressed-tensors.

    Attributes:
        config: config.json without its `quantization_config`.
        quantization: The `quantization_config`, or what stands for it.
        modules: Full names of its quantized layers, sorted.

    Raises:
        CheckpointError: settings are not read here, a layer's tensors are not complete, or there
            are none.
    """

    _files: dict[str, StoredTensors]

    def __init__(self, path: Path) -> None:
        self.path = path
        found = read_config(path)
        self.config, self.quantization = found.model, found.quantization or {}
        self._where = found.settings
        files = open_native(path, found.model, found.published)
        self._files = {name: file for name, file in files.items() if not name.endswith(OF_CACHE)}
        with named(self._where):
            self._settings = read_settings(self.quantization, self._files)
        self.modules = self._complete_layers()

    def layout_of(self, module: str) -> Layout:
        """How one of its quantized layers is laid out there."""
        return self._settings.of(module).layout

    def scheme_of(self, module: str) -> Scheme:
        """What one of its quantized layers is quantized to.

        Raises:
            CheckpointError: zero points are others than the settings say, or a scale is damaged.
        """
        return self._schemes[self._settings.of(module)]

    @cached_property
    def _schemes(self) -> dict[Kind, Scheme]:
        """By settings; symmetric where all layers of these are, which runs faster."""
        layers: dict[Kind, list[str]] = {}
        for module in self.modules:
            layers.setdefault(self._settings.of(module), []).append(module)
        return {kind: self._scheme(kind, modules) for kind, modules in layers.items()}

    def _scheme(self, kind: Kind, modules: Sequence[str]) -> Scheme:
        if kind.layout.zero_word is None:
            return kind.scheme
        symmetric = {self._is_symmetric(module, kind) for module in modules} == {True}  # sees all
        weights = integer_weights(kind.scheme).model_copy(update={"symmetric": symmetric})
        return kind.scheme.model_copy(update={"weights": weights})

    def _is_symmetric(self, module: str, kind: Kind) -> bool:
        """Whether a layer's grid is, seen without the signs of its scales."""
        name, zero = f"{module}.qzeros", kind.layout.zero_word
        plain = not bool((self.tensor(name) != zero).any())
        if not plain and integer_weights(kind.scheme).symmetric:
            assert zero is not None
            raise CheckpointError(
                f"{name} has other zero points than those of sym: true in {kind.layout.name}, "
                f"which is {zero & 0xFFFFFFFF:#x} in every word. checkpoint_format or sym of "
                f"{self._where} is wrong; get the checkpoint again"
            )
        scales = self.tensor(f"{module}.scales")
        with named(module):
            check_scale_values("scales", scales.abs())
        return plain and not bool((scales < 0).any())

    @property
    def plain_files(self) -> dict[str, StoredTensors]:
        """The files of the tensors that belong to no quantized layer, and of biases."""
        own = {
            f"{module}.{leaf}" for module in self.modules for leaf in self.layout_of(module).leaves
        }
        return {name: file for name, file in self._files.items() if name not in own}

    def layer(self, module: str) -> ForeignLayer:
        """A quantized layer, seen as tensors of ours.

        Raises:
            CheckpointError: the shapes of its tensors are no such layer's.
        """
        layout = self.layout_of(module)
        assert layout.shape is not None
        name = f"{module}.{layout.leaves[0]}"
        stored = self.shape(name)
        if len(stored) != 2:
            raise CheckpointError(f"{name} has shape {list(stored)}; needed is a matrix")
        scales = f"{module}.scales"
        dtype = self.dtype(scales) if scales in self else torch.float32
        path, shape = self._files[name].path, layout.shape(stored)
        return ForeignLayer(self, module, path, shape, dtype)

    def layer_tensors(self, module: str) -> dict[str, Tensor]:
        """The tensors of a quantized layer by their leaf."""
        return {leaf: self.tensor(f"{module}.{leaf}") for leaf in self.layout_of(module).leaves}

    def values(self, module: str) -> Tensor:
        """A quantized layer's weight in fp32 [N, K], of a layout that has `values`."""
        layout = self.layout_of(module)
        assert layout.values is not None
        tensors = self.layer_tensors(module)
        with named(module):
            return layout.values(tensors)

    @property
    def has_values(self) -> bool:
        """Whether every layer's layout has `values`."""
        return all(self.layout_of(module).values is not None for module in self.modules)

    @property
    def refusal(self) -> str | None:
        """What was found where no scheme here holds the weights of a layer; None where one does."""
        for module in self.modules:
            if self.layout_of(module).unpack is None:
                return f"{self._where}, of {module}: {self.layout_of(module).refusal}"
        return None

    @cached_property
    def input_scales(self) -> dict[str, Tensor]:
        """Static scales of its layers' inputs, fp32 [1], of a layout that has such.

        Of layers that read one input it is the largest, as runtimes that merge them take it.

        Raises:
            CheckpointError: one is not finite and positive, or no scalar.
        """
        found: dict[str, Tensor] = {}
        for block, modules in by_block(self.modules).items():
            inputs = common_inputs(self.config, block, modules) if block else {}
            largest: dict[str, Tensor] = {}
            for module in modules:
                name = f"{module}.{self.layout_of(module).inputs}"
                check_scale(name, scale := self.tensor(name), ((), (1,)))
                scale, own = scale.float().reshape(1), inputs.get(module, module)
                largest[own] = torch.maximum(scale, largest.get(own, scale))
            found |= {module: largest[inputs.get(module, module)] for module in modules}
        return found

    def _complete_layers(self) -> tuple[str, ...]:
        layout = self._settings.usual.layout  # leaves of all are the same
        end = f".{layout.marker}"
        modules = tuple(name.removesuffix(end) for name in self.names() if name.endswith(end))
        wanted = {f"{module}.{leaf}" for module in modules for leaf in layout.leaves}
        taken, own = set(modules), tuple(f".{leaf}" for leaf in layout.leaves if leaf != "weight")
        owners = {name: owner(name, taken) for name in self._files}
        found = {
            name
            for name, module in owners.items()
            if name.endswith(own) or (module and name != f"{module}.bias")
        }
        if not modules or wanted != found:
            name = min(wanted ^ found, default=f"any *{end}")
            state = "not expected" if name in found else "missing"
            raise CheckpointError(
                f"{self.path}: {name} is {state}. A layer in the {layout.name} layout has exactly "
                f"{', '.join(layout.leaves)}; get the checkpoint again"
            )
        return modules


class ForeignLayer:
    """A quantized layer of a foreign folder, or rows of one, as tensors of ours that no file has.

    Args:
        path: The file of its integers.
        shape: Outputs and inputs.
        dtype: The type that holds its scales exactly: that of its files.
        name: Its full name here; default `module`.
        first: The first of its rows in the folder's layer, of which it may be a part.

    Attributes:
        layout: How it is laid out in the folder.
        tensors: Type and shape of each of its tensors, by names of compressed-tensors.
    """

    def __init__(
        self,
        folder: ForeignFolder,
        module: str,
        path: Path,
        shape: Shape,
        dtype: torch.dtype,
        *,
        name: str | None = None,
        first: int = 0,
    ) -> None:
        self._folder, self._module, self._first = folder, module, first
        self.path, self.shape, self.dtype = path, shape, dtype
        self._name = name or module
        self.layout, self._scheme = folder.layout_of(module), folder.scheme_of(module)
        kinds = tensor_kinds(self._scheme, shape, dtype)
        if self.layout.inputs is not None:
            kinds[INPUT_SCALE] = (torch.float32, (1,))
        self.tensors = {f"{self._name}.{leaf}": kind for leaf, kind in kinds.items()}

    def rows(self, name: str, first: int, count: int) -> ForeignLayer:
        """A run of its rows, as a layer of its own."""
        shape = (count, self.shape[1])
        return ForeignLayer(
            self._folder, self._module, self.path, shape, self.dtype, name=name, first=first
        )

    def weight(self, device: torch.device | str = "cpu") -> StoredWeight:
        """Read and unpack it.

        Args:
            device: Where it goes, and where it is unpacked.

        Raises:
            CheckpointError: its tensors are damaged, or no integers in groups.
        """
        layout, spec = self.layout, integer_weights(self._scheme)
        assert layout.unpack is not None
        tensors = self._folder.layer_tensors(self._module)
        with named(self._module):
            found = layout.unpack({leaf: own.to(device) for leaf, own in tensors.items()})
        if not spec.symmetric:
            found = replace(found, zero_point=found.zeros)
        whole = len(found.q) == self.shape[0]
        return found if whole else found.rows(slice(self._first, self._first + self.shape[0]))

    def held(self, name: str) -> Tensor:
        """One of its tensors.

        Raises:
            CheckpointError: as `weight`, or its integers are asked for, and its groups are not
                neighbouring inputs, which these tensors do not say.
        """
        leaf = name.removeprefix(f"{self._name}.")
        if leaf == "weight_shape":
            return torch.tensor(self.shape)
        if leaf == INPUT_SCALE:
            return self._folder.input_scales[self._module]
        weight = self.weight()
        if leaf != "weight_packed":
            weight = replace(weight, order=None)
        with named(self._name):
            return weight_tensors(self._scheme, weight, self.dtype)[leaf]


def require_scheme(folder: ForeignFolder) -> None:
    """Refuse a folder whose weights no scheme here holds.

    Raises:
        CheckpointError: none does; the message has the commands that help.
    """
    refusal = folder.refusal
    if refusal is not None:
        path = folder.path
        raise CheckpointError(
            f"{path}: {refusal}. Make a float model of it with "
            f"{typed('convert', path, 'FLOAT', '--to', 'float')}, which runs, or is quantized with "
            "`ptq quantize FLOAT --scheme w4`"
        )


def refuse_to_run(folder: ForeignFolder) -> None:
    """Refuse a folder that has to be converted before it is run.

    Raises:
        CheckpointError: it has; the message has the command.
    """
    for layout in map(folder.layout_of, folder.modules):
        if layout.instead is not None:
            raise CheckpointError(
                f"{folder.path}: {layout.name} is not run as it is. Convert it, integers bit for "
                f"bit, with {typed('convert', folder.path, 'CONVERTED', '--to', layout.instead)}, "
                "and give CONVERTED"
            )
