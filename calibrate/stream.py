"""Runs a model one decoder block at a time, from the shards, without ever holding the whole.

The model is built from transformers' own modelling code on the meta device. One pass with blocks
that only record tells what the model hands to each of them (positions, masks, windows), so families
need no code of their own here; layers that transformers holds merged are taken apart
(`formats.modeling.model`). Then blocks are loaded, run on every sample and freed in turn.

Every sample is run alone and without padding. What is observed can therefore not depend on batch
size, and padding cannot enter it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from calibrate.attention import ATTENTION
from calibrate.block import DecoderBlock, to_host
from formats.errors import CheckpointError
from formats.families.names import EMBEDDING
from formats.families.registry import block_names, family_of
from formats.modeling.model import meta_model


class _Recorder(nn.Module):
    """Stands in a decoder block's place: records what it is given and passes it on."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        if hasattr(block, "attention_type"):
            self.attention_type = block.attention_type
        self.hidden: Tensor | None = None
        self.kwargs: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.hidden, self.kwargs = hidden_states, kwargs
        return hidden_states


class BlockStream:
    """The blocks of a model, one at a time.

    Args:
        config: The model's configuration.
        read: Gives a tensor of the checkpoint by its name.
        device: Where blocks run.
        dtype: Type they are computed in.
        quantized_path: Whether to keep, beside each sample's hidden states in the float model,
            those after the quantized blocks.

    Attributes:
        inputs: Hidden states of each sample before the next block: [tokens, hidden].
        quantized_inputs: Those after the quantized blocks, or None where they are not kept.

    Raises:
        CheckpointError: the model's family is not supported.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        read: Callable[[str], Tensor],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        quantized_path: bool = False,
    ) -> None:
        values = config.to_dict()
        self._family = family_of(values)
        self._read = read
        self._device, self._dtype = torch.device(device), dtype
        self._decoder: Any = meta_model(config, ATTENTION).get_submodule("model").eval()
        self._meta_blocks = list(self._decoder.layers)
        self.blocks = block_names(values)
        self.inputs: list[Tensor] = []
        self.quantized_inputs: list[Tensor] | None = [] if quantized_path else None
        self._kwargs: list[dict[int, dict[str, Any]]] = [{} for _ in self.blocks]

    def linears(self, block: str) -> tuple[str, ...]:
        """Full names of a block's linear layers."""
        module = self._meta_blocks[self.blocks.index(block)]
        return tuple(
            f"{block}.{path}"
            for path, part in module.named_modules()
            if isinstance(part, nn.Linear)
        )

    @torch.no_grad()
    def start(self, sequences: list[Tensor]) -> None:
        """Embed the samples.

        Args:
            sequences: Token ids of each sample: int64 [tokens], at least one.

        Raises:
            CheckpointError: the embedding has another shape than the configuration says.
        """
        decoder = self._decoder
        config = decoder.config
        recorders = [_Recorder(block) for block in self._meta_blocks]
        decoder.layers = nn.ModuleList(recorders)
        decoder.norm = nn.Identity()
        decoder.rotary_emb = type(decoder.rotary_emb)(config=config).to(self._device)
        shape = (config.vocab_size, config.hidden_size)
        weight = self._weight(f"{EMBEDDING}.weight", shape)
        scale = getattr(decoder.embed_tokens, "scalar_embed_scale", 1.0)  # Gemma's
        decoder.embed_tokens = nn.Embedding.from_pretrained(
            weight if scale == 1 else weight * scale
        )
        self.inputs = []
        for ids in sequences:
            decoder(input_ids=ids[None].to(self._device), use_cache=False)
            hidden = recorders[0].hidden
            assert hidden is not None
            self.inputs.append(to_host(hidden[0]))
            for kwargs, recorder in zip(self._kwargs, recorders, strict=True):
                kwargs.setdefault(len(ids), recorder.kwargs)
        decoder.embed_tokens = nn.Identity()  # no longer needed
        if self.quantized_inputs is not None:
            self.quantized_inputs = list(self.inputs)

    def go_on(self, inputs: list[Tensor], quantized_inputs: list[Tensor] | None) -> None:
        """Take up hidden states that were kept, in place of those that `start` made."""
        assert [len(x) for x in inputs] == [len(x) for x in self.inputs]
        self.inputs = inputs
        if self.quantized_inputs is not None:
            assert quantized_inputs is not None
            self.quantized_inputs = quantized_inputs

    def load(self, index: int) -> DecoderBlock:
        """Read a block's weights; its samples are those that `start` or `advance` left.

        Raises:
            CheckpointError: a weight has another shape than the configuration says.
        """
        name = self.blocks[index]
        module = copy.deepcopy(self._meta_blocks[index])
        state = {
            key: self._weight(f"{name}.{key}", meta.shape)
            for key, meta in module.state_dict().items()
        }
        module.load_state_dict(state, assign=True)
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        kwargs = self._kwargs[index]
        return DecoderBlock(
            name,
            self._family,
            module.eval(),
            self.inputs,
            kwargs,
            self.quantized_inputs,
            self._device,
        )

    def advance(
        self,
        block: DecoderBlock,
        outputs: Sequence[Tensor] | None = None,
        quantized_outputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Replace the samples by the block's outputs.

        The block's weights are freed, whoever still holds the block.

        Args:
            block: The block that was loaded last.
            outputs: From `DecoderBlock.output`, where known; else the block is run as it is.
            quantized_outputs: Those of the quantized block, where the stream keeps them.

        Raises:
            RecipeError: an output holds NaN or infinity.
        """
        if outputs is None:
            outputs = [block.output(sample) for sample in range(len(self.inputs))]
        self.inputs[:] = outputs
        if self.quantized_inputs is not None:
            assert quantized_outputs is not None
            self.quantized_inputs[:] = quantized_outputs
        block.module.to("meta")

    def _weight(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = self._read(name)
        if tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(
                f"{name}: found shape {tuple(tensor.shape)}; the model's configuration says "
                f"{tuple(shape)}. The checkpoint and its config.json do not belong together"
            )
        return tensor.to(self._device).to(self._dtype)  # narrow over the bus, wide there
