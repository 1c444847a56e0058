"""A random model that lies nowhere: its tensors are made on the device where they are read."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from formats.checkpoint import Checkpoint
from formats.scheme import LayerScheme
from formats.weights import StoredWeight
from inference.random_checkpoint import (
    constant_input_scale,
    kv_scales,
    quantized_layers,
    random_values,
    read_scheme,
    read_shape,
    round_to_nearest,
    tensor_shapes,
    words_of,
)


class RandomCheckpoint(Checkpoint):
    """A checkpoint of random weights that lies nowhere: its tensors are made when they are read.

    Args:
        shape: As in `read_shape`.
        scheme: As in `read_scheme`.
        quantize_head: As in `random_checkpoint`.
        device: Where tensors are made.
    """

    def __init__(
        self, shape: str, scheme: str, device: torch.device | str, *, quantize_head: bool = False
    ) -> None:
        name, config = read_shape(shape)
        self.path, self.scheme = Path(f"{name}-{scheme}"), read_scheme(scheme)
        self.config = config | {"torch_dtype": "bfloat16"}
        self._device, self._shapes = device, tensor_shapes(config)
        self._layers = quantized_layers(self._shapes, self.scheme, quantize_head)
        self.quantized_modules, self.scale_table = tuple(sorted(self._layers)), None
        self.kv_scales = kv_scales(config, self.scheme)

    def __contains__(self, name: str) -> bool:
        module, _, leaf = name.rpartition(".")
        if module in self._layers and leaf == "input_scale":
            return self._layers[module].static_input
        return name in self._shapes and (leaf != "weight" or module not in self._layers)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        """A random tensor: the same each time."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return random_values(name, self._shapes[name], generator)

    def weight(self, module: str, out: Tensor | None = None) -> StoredWeight:
        """A random quantized weight."""
        own = round_to_nearest(self.tensor(f"{module}.weight").float(), self._layers[module])
        return own if out is None else replace(own, q=out.copy_(own.q))

    def weight_shape(self, module: str) -> tuple[int, ...]:
        """Outputs and inputs of a linear layer."""
        return self._shapes[f"{module}.weight"]

    def scheme_of(self, module: str) -> LayerScheme:
        """How a linear layer is quantized."""
        return self._layers.get(module, LayerScheme())

    def scale(self, name: str) -> Tensor:
        """The scale of a static input."""
        inputs = self._layers[name.rpartition(".")[0]].activations
        assert inputs is not None
        return constant_input_scale(inputs)

    @property
    def nbytes(self) -> int:
        """0: nothing lies on a disk."""
        return 0


def random_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of a random model."""
    return PreTrainedTokenizerFast(tokenizer_object=words_of(vocabulary), unk_token="t0")
