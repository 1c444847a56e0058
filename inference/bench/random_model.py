"""A random model that is stored nowhere: its tensors are made on the device where they are read."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from formats.cache_scheme import KVCacheSpec
from formats.checkpoint.kv_scales import Sinks
from formats.checkpoint.part import Cut, Span, cut_shape
from formats.checkpoint.read import Checkpoint
from formats.families.names import EMBEDDING, HEAD
from formats.scheme import LayerScheme
from formats.stored.weights import StoredWeight
from inference.bench.random_weights import (
    HEAD_PRESET,
    constant_input_scale,
    kv_offsets,
    kv_scales,
    quantized_layers,
    random_values,
    round_to_nearest,
    tensor_shapes,
    words_of,
)
from inference.bench.shapes import PUBLISHED, read_scheme, read_shape


class RandomCheckpoint(Checkpoint):
    """A checkpoint of random weights in no file: its tensors are made when they are read.

    Args:
        shape: As in `read_shape`.
        scheme: As in `read_scheme`.
        device: Where tensors are made.
        quantize_head: Quantize the head too, which is the embedding of a tied shape.
        head: How: a preset; default int8, its input per token.

    Attributes:
        layers: Schemes of the linear layers that are quantized.
    """

    def __init__(
        self,
        shape: str,
        scheme: str,
        device: torch.device | str,
        *,
        quantize_head: bool = False,
        head: str = HEAD_PRESET,
    ) -> None:
        name, config = read_shape(shape)
        self.path, self.scheme = Path(f"{name}-{scheme}"), read_scheme(scheme)
        self.config, self.sinks = config | {"torch_dtype": "bfloat16"}, Sinks()
        self._device, self._shapes = device, tensor_shapes(config)
        experts, of_head = PUBLISHED.get(shape), read_scheme(head).of_layers
        self._shares_head = quantize_head and f"{HEAD}.weight" not in self._shapes
        if self._shares_head:
            self._shapes[f"{HEAD}.weight"] = self._shapes.pop(f"{EMBEDDING}.weight")
        rest = {HEAD: of_head} if quantize_head else {}
        layers = quantized_layers(self._shapes, self.scheme, experts)
        if layers and self.scheme.of_layers not in layers.values():  # only experts, or no 128 fits
            first = next(iter(layers.values()))
            self.scheme = self.scheme.model_copy(update={"weights": first.weights})
        self.layers = layers | rest
        self.quantized_modules, self.scale_table = tuple(sorted(self.layers)), None
        self.kv_scales = kv_scales(config, self.scheme)
        self.kv_offsets = kv_offsets(config, self.scheme)

    def __contains__(self, name: str) -> bool:
        module, _, leaf = name.rpartition(".")
        if module in self.layers and leaf == "input_scale":
            return self.layers[module].static_input
        return name in self._shapes and (leaf != "weight" or module not in self.layers)

    def reorders_inputs(self, module: str) -> bool:
        """No layer's inputs are in another order."""
        return False

    @property
    def shares_head(self) -> bool:
        """Whether the quantized head is the embedding, too."""
        return self._shares_head

    def names(self) -> tuple[str, ...]:
        """All tensors of the model, as they are before layers are quantized."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        """A random tensor: the same each time."""
        return random_values(name, self._shapes[name], self._generator(name))

    def tensors(self, names: Sequence[str]) -> Tensor:
        """Weights that are not quantized, or scales of static inputs, as one."""
        if names[0].endswith(".input_scale"):
            return self.scale(names[0]).repeat(len(names))
        return _below(self._drawn(names))

    def weights(self, modules: Sequence[str], device: torch.device | str = "cpu") -> StoredWeight:
        """Random quantized weights as one; they are where tensors are made."""
        scheme = self.layers[modules[0]]
        drawn = self._drawn([f"{module}.weight" for module in modules])
        made = [round_to_nearest(values.float(), scheme) for values in drawn]
        zeros = [part.zero_point for part in made if part.zero_point is not None]
        q, scale = _below(part.q for part in made), _below(part.scale for part in made)
        return StoredWeight(q, scale, _below(zeros) if zeros else None)

    def part(self, cuts: Mapping[str, Cut], vectors: Mapping[str, Span]) -> RandomCheckpoint:
        """Random weights of the shapes of some outputs and inputs of its layers."""
        own, shapes = copy.copy(self), dict(self._shapes)
        for name, shape in shapes.items():
            module, _, leaf = name.rpartition(".")
            if name in vectors:
                shapes[name] = (vectors[name].count,)
            elif module in cuts and leaf == "weight":
                shapes[name] = cut_shape(shape, cuts[module])
            elif module in cuts and cuts[module].rows is not None:  # a bias
                shapes[name] = cut_shape((*shape, 1), cuts[module])[:1]
        own._shapes = shapes
        return own

    def _drawn(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Random weights, of neighbours of one shape together: [how many, N, K]."""
        for shape, run in groupby(names, self._shapes.__getitem__):
            alike = list(run)
            yield random_values(alike[0], (len(alike), *shape), self._generator(alike[0]))

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))

    def weight_shape(self, module: str) -> tuple[int, ...]:
        """Outputs and inputs of a linear layer."""
        return self._shapes[f"{module}.weight"]

    def scheme_of(self, module: str) -> LayerScheme:
        """How a linear layer is quantized."""
        return self.layers.get(module) or LayerScheme()

    def kv_scheme_of(self, attention: str) -> KVCacheSpec | None:
        """How the cache is quantized: alike in all blocks."""
        return self.scheme.kv_cache

    def scale(self, name: str) -> Tensor:
        """The scale of a static input."""
        inputs = self.layers[name.rpartition(".")[0]].activations
        assert inputs is not None
        return constant_input_scale(inputs)

    @property
    def nbytes(self) -> int:
        """0: nothing is on a disk."""
        return 0


def _below(parts: Iterable[Tensor]) -> Tensor:
    """Parts [how many, rows, columns] as rows below each other."""
    rows = [part.flatten(0, 1) for part in parts]
    if len(rows) == 1:
        return rows[0]
    out = rows[0].new_empty((sum(map(len, rows)), rows[0].shape[1]))
    for place, part in zip(out.split([len(part) for part in rows]), rows, strict=True):
        place.copy_(part)  # e4m3 too, of which not every torch can join some
    return out


def random_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of a random model."""
    return PreTrainedTokenizerFast(tokenizer_object=words_of(vocabulary), unk_token="t0")
