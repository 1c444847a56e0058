"""transformers' code of a model, loaded: its linear layers a backend's, all else as floats."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.block_layers import common_inputs
from formats.families.predicting import Predicting
from formats.families.registry import find_family
from formats.memory import release_freed_memory
from formats.modeling.config import transformers_config
from formats.modeling.experts import Experts
from formats.modeling.found import is_linear
from formats.modeling.load import load_own, materialize
from formats.modeling.model import SideBySide, found_model, meta_model
from formats.modeling.structure import Structure
from formats.scheme import LayerScheme
from inference.models.layers import LayerFactory, LinearLayer
from inference.models.read import StoredLinear, dequantized, finite, read_linear
from inference.transformers_code.attention import NAME, attend
from inference.transformers_code.known import use_kernels
from inference.transformers_code.linear import (
    BackendLinear,
    Embedding,
    Head,
    HeadRows,
    OwnEmbedding,
    PartOfLinear,
    RoutedExperts,
    SharedInput,
    fix_frequencies,
    in_one_order,
    takes_rows,
)
from inference.transformers_code.state import stand_in, state_shapes, states_of

AttentionInterface.register(NAME, attend)


def load_code(
    checkpoint: Checkpoint, structure: Structure, factory: LayerFactory[Any, Any], longest: int
) -> nn.Module:
    """A model by transformers' own code, ready to run steps.

    Args:
        structure: Of its code.
        longest: Most tokens that a request may have.

    Raises:
        CheckpointError: tensors are missing or of another shape.
    """
    model: Any
    config = transformers_config(checkpoint.config)
    config.dtype = factory.dtype  # of tables that its code makes
    if find_family(checkpoint.config) is None:
        model, stored = found_model(config, NAME)
    else:  # cut and named as its declaration has it
        model, stored = meta_model(config, NAME), {}
    hidden, count = model.config.get_text_config().hidden_size, states_of(model)
    shapes = {
        name: state_shapes(model.get_submodule(name), hidden, count, factory.dtype)
        for name in structure.mixers
    }
    _Loader(model, stored, checkpoint, structure, factory).load()
    fix_frequencies(model, longest)
    stand_in(
        model.eval(), structure.mixers, shapes, same_bits=factory.same_bits,
        functions=factory.functions,
    )  # fmt: skip
    use_kernels(model)
    return model.eval()


def load_predicting(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    structure: Structure,
    names: Predicting,
    beside: nn.Module,
    factory: LayerFactory[Any, Any],
    longest: int,
) -> nn.Module:
    """A layer that predicts further tokens, as a model of one block.

    Args:
        checkpoint: Has the layer.
        config: config.json of a model with one block, such as the layer's.
        structure: Of the model that it follows, with one such block alone.
        names: Where the layer is in the checkpoint.
        beside: That model, loaded, whose embedding and head are the layer's.
        longest: Most tokens that a request may have.

    Returns:
        The model; what is around the layer's block is a module of the layer's name in it.

    Raises:
        CheckpointError: tensors are missing or of another shape.
    """
    own: Any = transformers_config(config)
    own.dtype = factory.dtype
    model, stored = found_model(own, NAME)
    assert names.module is not None
    assert structure.norm is not None
    around, hidden = nn.Module(), own.get_text_config().hidden_size
    for name in (names.embedded_norm, names.hidden_norm):
        around.add_module(name, copy.deepcopy(model.get_submodule(structure.norm)))
    joined = nn.Linear(2 * hidden, hidden, bias=False, device="meta")
    around.add_module(names.joined, joined)
    model.add_module(names.module, around)
    (block,), layer = structure.blocks, f"{names.module}.{names.block}"
    places = {f"{structure.list}.0": layer, structure.norm: f"{names.module}.{names.norm}"}
    tensors: list[str] = [n for n, _ in (*model.named_parameters(), *model.named_buffers())]
    renamed = {name: _moved(stored.get(name, name), places) for name in tensors}
    there = {block.name: layer}
    inputs = {_moved(a, there): _moved(b, there) for a, b in block.inputs.items()}
    weighed = tuple(_moved(name, there) for name in block.weighed)
    structure = replace(structure, blocks=(replace(block, inputs=inputs, weighed=weighed),))
    _Loader(model, renamed, checkpoint, structure, factory).load(beside)
    fix_frequencies(model, longest)
    use_kernels(model.eval())
    return model


def _moved(name: str, places: Mapping[str, str]) -> str:
    """The full name of what is in a module that has another name."""
    for old, new in places.items():
        if name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def nbytes_of(model: nn.Module) -> int:
    """Bytes of a loaded model's weights."""
    layers = {id(own): own for own in map(_layer_of, model.modules()) if own is not None}
    floats = {p.data_ptr(): p.nbytes for p in model.parameters()}
    shared = {own.matrix.data_ptr() for own in layers.values() if own.matrix is not None}
    rest = sum(size for place, size in floats.items() if place not in shared)
    return rest + sum(own.nbytes for own in layers.values())


def _layer_of(module: nn.Module) -> LinearLayer | None:
    """The backend's layer that a module runs."""
    if isinstance(module, PartOfLinear):
        return module.shared.layer
    return module.layer if isinstance(module, BackendLinear | Head) else None


class _Loader:
    """Puts layers and tensors into a model on the meta device.

    Args:
        stored: Names in the files of its tensors.
        structure: Of its code.
    """

    def __init__(
        self,
        model: Any,
        stored: Mapping[str, str],
        checkpoint: Checkpoint,
        structure: Structure,
        factory: LayerFactory[Any, Any],
    ) -> None:
        self._model, self._stored, self._checkpoint = model, stored, checkpoint
        self._structure, self._factory = structure, factory
        self._inputs: dict[str, str] = {}
        family = find_family(checkpoint.config)
        self._weighed = {name for block in structure.blocks for name in block.weighed}
        for block in structure.blocks:
            if family is None:
                self._inputs |= block.inputs
            else:
                parts = model.get_submodule(block.name).named_modules()
                names = [f"{block.name}.{n}" for n, m in parts if isinstance(m, nn.Linear)]
                self._inputs |= common_inputs(family, block.name, names)

    def load(self, beside: Any = None) -> None:
        """Load everything.

        Args:
            beside: A loaded model whose embedding and head are this one's, too; None for its own.
        """
        if beside is None:
            self._load_head()
        else:
            for get in ("get_input_embeddings", "get_output_embeddings"):
                self._put(getattr(self._model, get)(), getattr(beside, get)())
        for name, parent in list(self._model.named_modules()):
            linears = dict(_linears(parent))
            wholes = {k: v for k, v in vars(parent).items() if isinstance(v, SideBySide)}
            if linears:
                self._load_linears(name, parent, linears)
                release_freed_memory()  # else what packing leaves allocated may add up
            for key, whole in wholes.items():
                _as_one(parent, key, list(whole.parts))
        materialize(
            self._model,
            self._tensor,
            owner=self._model,
            stored=self._stored,
            skip=[p for p in self._model.modules() if isinstance(p, Embedding | OwnEmbedding)],
            device=self._factory.device,
            dtype=self._factory.dtype,
        )
        for path, parent in list(self._model.named_modules()):
            for name, part in list(parent.named_children()):
                if isinstance(part, Experts):
                    setattr(parent, name, RoutedExperts(part))
            weight = parent._parameters.get("weight")
            product = weight is not None and weight.dim() == 2
            if self._factory.same_bits and product and not isinstance(parent, nn.Embedding):
                assert weight is not None
                stored = StoredLinear([[path]], LayerScheme(), weight.data)
                in_one_order(parent, self._factory.linear(stored))

    def _load_head(self) -> None:
        """The layer that gives logits; a tied embedding is its matrix where it is stored as one."""
        head, embedding = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        if not isinstance(head, nn.Linear):
            raise CheckpointError(
                f"{type(self._model).__name__}: its logits are not given by a linear layer, which "
                "is not run here"
            )
        own, checkpoint = self._structure.head, self._checkpoint
        there = f"{own}.weight" in checkpoint or own in checkpoint.quantized_modules
        of = own if there else self._structure.embedding
        stored = read_linear(checkpoint, (of,), self._factory.device)
        if not there and f"{own}.bias" in checkpoint:  # of its own, beside the embedding's matrix
            bias = self._tensor(f"{own}.bias").float().to(self._factory.device)
            stored = replace(stored, bias=bias)
        layer = self._factory.linear(stored)
        self._put(head, Head(layer, self._factory.dtype))
        shared = None if there else layer.matrix
        self._load_embeddings(embedding, layer, shared)

    def _load_embeddings(self, main: nn.Module, head: LinearLayer, shared: Tensor | None) -> None:
        """Hold embeddings in the type that they are stored in, where their code allows it.

        Args:
            main: That of tokens.
            head: The layer that gives logits.
            shared: Its matrix, where that is this embedding; None for none.
        """
        for name, part in list(self._model.named_modules()):
            plain = type(part) is nn.Embedding
            if not isinstance(part, nn.Embedding) or (plain and part is not main):
                continue
            if not plain:
                meta = part.weight
                self._load_buffers(part, name)
                if not takes_rows(part):
                    part.weight = meta
                    continue
            table: Embedding | HeadRows
            if part is main and self._checkpoint.shares_head and head.gathers:
                table = HeadRows(head, self._factory.dtype)
            else:
                own = self._floats(self._stored_module(name)) if part is not main else shared
                own = self._floats(self._structure.embedding) if own is None else own
                table = Embedding(own, self._factory.dtype)
            self._put(part, table if plain else OwnEmbedding(part, table))

    def _load_buffers(self, part: nn.Embedding, name: str) -> None:
        """Load what the code of an embedding multiplies by, and the like, and no weight."""
        blank = torch.zeros(1, part.embedding_dim)
        part.weight = nn.Parameter(blank.to("meta"), requires_grad=False)
        load_own(
            part,
            name,
            lambda own: blank if own == f"{name}.weight" else self._tensor(own),
            owner=self._model,
            device=self._factory.device,
            dtype=self._factory.dtype,
        )

    def _put(self, part: nn.Module, other: nn.Module) -> None:
        """Put a module in the place of one of the code's."""
        place = next(name for name, module in self._model.named_modules() if module is part)
        self._model.set_submodule(place, other)

    def _load_linears(
        self, parent_name: str, parent: nn.Module, linears: Mapping[str, nn.Linear]
    ) -> None:
        """Put a backend's layers in the place of a module's, as one where they read one input."""
        groups: dict[str, dict[str, str]] = {}
        for name, linear in linears.items():
            own = self._stored_module(f"{parent_name}.{name}".lstrip("."))
            if own in self._weighed:
                continue
            if linear.bias is not None and f"{own}.bias" not in self._checkpoint:
                raise CheckpointError(f"{own}.bias is missing from {self._checkpoint.path}")
            groups.setdefault(self._inputs.get(own, own), {})[name] = own
        for group in groups.values():
            layer = self._read_as_one(list(group.values())) if len(group) > 1 else None
            if layer is None:
                for name, own in group.items():
                    stored = read_linear(self._checkpoint, (own,), self._factory.device)
                    setattr(parent, name, BackendLinear(self._factory.linear(stored)))
                continue
            shared = SharedInput(layer, [linears[name].out_features for name in group])
            for index, name in enumerate(group):
                setattr(parent, name, PartOfLinear(shared, index))

    def _stored_module(self, module: str) -> str:
        """Name of a module of the code in the files."""
        return self._stored.get(f"{module}.weight", f"{module}.weight").removesuffix(".weight")

    def _read_as_one(self, modules: Sequence[str]) -> LinearLayer | None:
        """Layers that read one input as one layer; None where they are not quantized alike."""
        try:
            stored = read_linear(self._checkpoint, modules, self._factory.device)
        except CheckpointError:  # what is wrong with one of them is said when it is read alone
            return None
        return self._factory.linear(stored)

    def _floats(self, module: str) -> Tensor:
        """The weight of an embedding, as it is stored where that can be."""
        own = self._tensor(f"{module}.weight").to(self._factory.device)
        return own if own.dtype in (torch.float32, torch.bfloat16) else own.to(self._factory.dtype)

    def _tensor(self, stored: str) -> Tensor:
        """A tensor of the files, or the one that it is where it is tied and not there."""
        if stored not in self._checkpoint:
            stored = self._structure.tied.get(stored, stored)
        if self._checkpoint.shares_head and stored == f"{self._structure.embedding}.weight":
            head = read_linear(self._checkpoint, (self._structure.head,), torch.device("cpu"))
            return dequantized(head)  # for an embedding that its code computes itself
        return finite(self._checkpoint, stored)


def _as_one(parent: nn.Module, name: str, parts: Sequence[str]) -> None:
    """Put the layers that a module's code calls as one, by a name, in the place of that one."""
    loaded = {part: parent.get_submodule(part) for part in parts}
    shared = {m.shared for m in loaded.values() if isinstance(m, PartOfLinear)}
    delattr(parent, name)
    if len(shared) != 1 or len(parts) != len(next(iter(shared)).outputs):
        parent.__dict__[name] = SideBySide(loaded)
        return
    for part in parts:
        delattr(parent, part)
    setattr(parent, name, BackendLinear(shared.pop().layer))


def _linears(parent: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers of a module by their own names; a router may be one that computes otherwise."""
    for name, part in parent.named_children():
        if isinstance(part, nn.Linear) and is_linear(part):
            yield name, part
