"""Runs a model one decoder block at a time, from the shards, without ever holding the whole.

The model is built from transformers' own modelling code on the meta device. One pass with blocks
that only record tells what the model hands to each of them (positions, masks, windows), so families
need no code of their own here; experts are taken apart (`calibrate.experts`). Then blocks are
loaded, run on every sample and freed in turn.

Every sample is run alone and without padding. What is observed can therefore not depend on batch
size, and padding cannot enter it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PretrainedConfig

from calibrate.attention import ATTENTION, Cache, OnKV, watched
from calibrate.experts import Experts, OnRoute, split_experts
from formats.errors import CheckpointError, RecipeError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")

OnInput = Callable[[str, Tensor], None]


def to_host(x: Tensor) -> Tensor:
    """A copy in host memory that a GPU reaches at full speed; `x` itself if it is on the host."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)


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


class Block:
    """A decoder block with its weights, its samples, and hooks into its run.

    Attributes:
        name: Full name, such as `model.layers.0`.
        attention: Full name of its attention module.
        module: The block; its float weights may be replaced by methods.
        linears: Its linear layers by full name.
        device: Where its weights are.
        inputs: Hidden states of each sample: [tokens, hidden], in the host's memory.
        quantized_inputs: The same after the quantized blocks before, where the stream keeps them.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        inputs: list[Tensor],
        kwargs: dict[int, dict[str, Any]],
        quantized_inputs: list[Tensor] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.name = name
        self.device = device or torch.device("cpu")
        self.attention = f"{name}.self_attn"
        self.module = module
        self.inputs = inputs
        self.quantized_inputs = quantized_inputs
        self.linears = {
            f"{name}.{path}": part
            for path, part in module.named_modules()
            if isinstance(part, nn.Linear)
        }
        self._kwargs = kwargs

    @torch.no_grad()
    def run(
        self,
        sample: int,
        *,
        on_input: OnInput | None = None,
        on_kv: OnKV | None = None,
        on_route: OnRoute | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Run one sample through the block as it is now.

        Args:
            sample: Index into `inputs`.
            on_input: Called with each linear layer's full name and its input [tokens, in]; layers
                of experts see every token.
            on_kv: Called with K after RoPE and V, both [tokens, kv heads, head_dim].
            on_route: Called with the full name of the experts and how many tokens the router sends
                to each of them: int64 [experts].
            cache: Makes of the same what attention reads of them.

        Returns:
            Hidden states [tokens, hidden], on the block's device.
        """
        with self._hooks(on_input, on_kv, on_route, cache):
            return self.forward(self.inputs[sample])

    def output(
        self,
        sample: int,
        *,
        on_input: OnInput | None = None,
        on_kv: OnKV | None = None,
        on_route: OnRoute | None = None,
    ) -> Tensor:
        """`run`, checked and in the host's memory: a sample's hidden states for the next block.

        Raises:
            RecipeError: they hold NaN or infinity.
        """
        out = self.run(sample, on_input=on_input, on_kv=on_kv, on_route=on_route)
        if not (bool(out.sum().isfinite()) or bool(out.isfinite().all())):  # the sum is quicker
            raise RecipeError(
                f"{self.name}: its output holds NaN or infinity. Check the model's weights"
            )
        return to_host(out)

    def forward(self, hidden: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """The block's function, with gradients: hidden states [tokens, hidden] to the same.

        Args:
            hidden: As long as one of the samples.
            weights: Weights to compute with in place of those of linear layers, by the layer's
                full name.
        """
        given = {f"{n.removeprefix(f'{self.name}.')}.weight": w for n, w in (weights or {}).items()}
        out = functional_call(
            self.module, given, (hidden[None].to(self.device),), self._kwargs[len(hidden)]
        )
        return (out[0] if isinstance(out, tuple) else out)[0]

    @contextmanager
    def _hooks(
        self,
        on_input: OnInput | None,
        on_kv: OnKV | None,
        on_route: OnRoute | None,
        cache: Cache | None,
    ) -> Iterator[None]:
        attention = self.module.get_submodule("self_attn")
        with ExitStack() as stack:
            if on_input is not None:
                for name, linear in self.linears.items():

                    def hook(_: nn.Module, args: tuple[Tensor], name: str = name) -> None:
                        on_input(name, args[0].flatten(0, -2))

                    stack.callback(linear.register_forward_pre_hook(hook).remove)
            for path, experts in self.module.named_modules():
                if isinstance(experts, Experts):
                    name = f"{self.name}.{path}"
                    stack.enter_context(experts.watched(name, on_input is not None, on_route))
            stack.enter_context(watched(attention, on_kv, cache))
            yield


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
        RecipeError: the model's family is not supported.
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
        if config.model_type not in SUPPORTED:
            raise RecipeError(
                f"model_type {config.model_type!r} is not supported; supported are "
                f"{', '.join(SUPPORTED)}"
            )
        self._read = read
        self._device, self._dtype = torch.device(device), dtype
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=ATTENTION
            )
        split_experts(model, config.model_type)
        self._decoder = model.model.eval()
        self._meta_blocks = list(self._decoder.layers)
        self.blocks = tuple(f"model.layers.{i}" for i in range(len(self._meta_blocks)))
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
        weight = self._weight("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        decoder.embed_tokens = nn.Embedding.from_pretrained(weight)
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

    def load(self, index: int) -> Block:
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
        return Block(name, module.eval(), self.inputs, kwargs, self.quantized_inputs, self._device)

    def advance(
        self,
        block: Block,
        outputs: Sequence[Tensor] | None = None,
        quantized_outputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Replace the samples by the block's outputs.

        The block's weights are freed, whoever still holds the block.

        Args:
            block: The block that was loaded last.
            outputs: From `Block.output`, where they are known; else the block is run as it is.
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
