"""Runs a model one decoder block at a time, from the shards, without ever holding the whole.

The model is built from transformers' own modelling code on the meta device. One pass with blocks
that only record tells what the model hands to each of them (positions, masks, windows), so families
need no code of their own here; layers that transformers holds merged are taken apart
(`formats.modeling.model`). What that pass calls before the last block (embeddings of any kind,
rotations) is loaded when it is called. Then blocks are loaded, run on every sample and freed in
turn.

Every sample is run alone and without padding. What is observed can therefore not depend on batch
size, and padding cannot enter it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from calibrate.attention import ATTENTION, BESIDE
from calibrate.block import DecoderBlock, Given
from calibrate.transfers import to_host
from calibrate.workers import ReadAhead
from formats.errors import CheckpointError
from formats.families.registry import find_family
from formats.modeling.layers import (
    attention_of_blocks,
    block_names,
    head_name,
    structure_of,
    tied_names,
)
from formats.modeling.load import load_own, materialize
from formats.modeling.model import meta_model
from formats.modeling.stored_names import renamed_modules


class _Recorder(nn.Module):
    """Stands in a decoder block's place: records what it is given and passes on hidden states.

    Whatever else the model's code asks of the block, it finds there.
    """

    def __init__(self, block: nn.Module, outputs: int | None) -> None:
        super().__init__()
        self.__dict__["_block"] = block
        self._outputs = outputs
        self.hidden: Tensor | None = None
        self.given = Given()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = next(iter(kwargs)) if not args else None
        self.hidden = args[0] if named is None else kwargs.pop(named)
        self.given = Given(args[1:], kwargs, named)
        rest = (None,) * ((self._outputs or 1) - 1)
        return self.hidden if self._outputs is None else (self.hidden, *rest)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"], name)


class _AllRecordedError(Exception):
    """The last block was reached: what comes after it needs not be run."""


class _Last(_Recorder):
    """The recorder in the last block's place.

    Attributes:
        after: Hidden states [1, tokens, hidden] to go on with; None to stop here.
    """

    after: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        passed = super().forward(*args, **kwargs)
        if self.after is None:
            raise _AllRecordedError
        return self.after if self._outputs is None else (self.after, *passed[1:])


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
        device: Where blocks run.
        head_layer: Full name of the layer that gives logits.
        inputs: Hidden states of each sample before the next block: [tokens, hidden].
        quantized_inputs: Those after the quantized blocks, or None where they are not kept.
        sinks: Tokens at the beginning of each sample that blocks keep apart.

    Raises:
        CheckpointError: the model is none that is run here; the message says why.
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
        self._family = find_family(values)
        self._found = None if self._family is not None else structure_of(values)
        self._stored = self._found.stored if self._found else {}
        self._read, self._tied = ReadAhead(read), tied_names(values)
        self.head_layer = head_name(values)
        self.device, self._dtype = torch.device(device), dtype
        own = copy.deepcopy(config)
        own.dtype = dtype  # of tables that its code makes
        self._model: Any = meta_model(own, ATTENTION).eval()
        self._list = self._found.list if self._found else "model.layers"
        self._meta_blocks = list(self._model.get_submodule(self._list))
        self._refuse_unknown_attention()
        self.blocks, self._attentions = block_names(values), attention_of_blocks(values)
        self.inputs: list[Tensor] = []
        self.quantized_inputs: list[Tensor] | None = [] if quantized_path else None
        self.sinks = 0
        self._given: list[dict[int, Given]] = [{} for _ in self.blocks]
        self._last: _Recorder | None = None

    def _refuse_unknown_attention(self) -> None:
        """Refuse what changes attention and is not computed here.

        Raises:
            CheckpointError: the model's code hands it to attention.
        """
        for site in self._found.attentions if self._found else ():
            unknown = set(site.arguments) - BESIDE.keys() - {"mask"}
            masked = "mask" in site.arguments and len(site.arguments) > 1
            if unknown or masked:
                told = ", ".join(sorted(unknown or site.arguments))
                raise CheckpointError(
                    f"{site.module}: its code hands {told} to attention, which is not computed here"
                )

    def linears(self, block: str) -> tuple[str, ...]:
        """Full names of a block's linear layers."""
        index = self.blocks.index(block)
        names = self._names(index)
        return tuple(
            names.get(path, f"{block}.{path}")
            for path, part in self._meta_blocks[index].named_modules()
            if isinstance(part, nn.Linear)
        )

    def outputs(self, block: str) -> tuple[int, ...]:
        """How many outputs each of a block's linear layers has."""
        parts = self._meta_blocks[self.blocks.index(block)].modules()
        return tuple(part.out_features for part in parts if isinstance(part, nn.Linear))

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return self._model.config.get_text_config().hidden_size

    def _names(self, index: int) -> dict[str, str]:
        """Full names in the files of a block's modules, by their names in its code, if others."""
        code = self._meta_blocks[index].state_dict()
        return renamed_modules(dict(zip(code, self._stored_names(index), strict=True)))

    def _stored_names(self, index: int) -> list[str]:
        """Full names in the files of a block's tensors, in the order of its code."""
        code = self._meta_blocks[index].state_dict()
        return [
            self._stored.get(full, full) for full in (f"{self._list}.{index}.{c}" for c in code)
        ]

    @torch.no_grad()
    def start(self, sequences: list[Tensor]) -> None:
        """Embed the samples.

        Args:
            sequences: Token ids of each sample: int64 [tokens], at least one.

        Raises:
            CheckpointError: the embedding has another shape than the configuration says, or blocks
                are handed more of a sample than its hidden states and its length.
        """
        recorders = self._recorders()
        self._last = recorders[-1]
        self.inputs = []
        with self._loaded_when_called():
            for ids in sequences:
                self.inputs.append(self._embed(ids, recorders))
                for given, recorder in zip(self._given, recorders, strict=True):
                    given.setdefault(len(ids), recorder.given)
            if self._found is not None:
                self._check_given(sequences[0], recorders)
        if self.quantized_inputs is not None:
            self.quantized_inputs = list(self.inputs)

    def _recorders(self) -> list[_Recorder]:
        """Put recorders into the places of the blocks."""
        found = [block.outputs for block in self._found.blocks] if self._found else None
        outputs = found or [None] * len(self._meta_blocks)
        kinds = [_Recorder] * (len(outputs) - 1) + [_Last]
        each = zip(kinds, self._meta_blocks, outputs, strict=True)
        recorders = [kind(block, count) for kind, block, count in each]
        parent, _, name = self._list.rpartition(".")
        setattr(self._model.get_submodule(parent), name, nn.ModuleList(recorders))
        return recorders

    def _embed(self, ids: Tensor, recorders: list[_Recorder]) -> Tensor:
        """Hidden states of a sample before the first block, in the host's memory."""
        with suppress(_AllRecordedError):
            self._model(input_ids=ids[None].to(self.device), use_cache=False)
        hidden = recorders[0].hidden
        assert hidden is not None
        return to_host(hidden[0])

    def _check_given(self, ids: Tensor, recorders: list[_Recorder]) -> None:
        """Refuse blocks that get more of the tokens than hidden states, by another sample."""
        self._embed(ids.flip(0), recorders)
        for block, given, recorder in zip(self.blocks, self._given, recorders, strict=True):
            if not _same(given[len(ids)], recorder.given):
                raise CheckpointError(
                    f"{block}: its code hands it more of the tokens than their hidden states, "
                    "which calibration block by block does not keep"
                )

    @contextmanager
    def head(
        self, on_output: Callable[[Tensor], None] = lambda _: None
    ) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
        """For a while, what the model's own code does after the last block; `start` comes first.

        Args:
            on_output: Called with what the layer that gives logits gives, [1, tokens, vocabulary]:
                the model's code may make others of it.

        Yields:
            Called with a sample's token ids [tokens] and the hidden states after the last block
            [tokens, hidden]: its logits [tokens, vocabulary], with gradients.
        """
        last = self._last
        assert isinstance(last, _Last), "the samples were not embedded"

        def logits(ids: Tensor, hidden: Tensor) -> Tensor:
            last.after = hidden[None]
            return self._model(input_ids=ids[None].to(self.device), use_cache=False).logits[0]

        layer = self._model.get_output_embeddings()
        handle = layer.register_forward_hook(lambda _, __, out: on_output(out))
        try:
            with self._loaded_when_called():
                yield logits
        finally:
            handle.remove()
            last.after = None

    @contextmanager
    def _loaded_when_called(self) -> Iterator[None]:
        """Load what is outside of the blocks when its code is called, and free it in the end."""
        handles, loaded, shared = [], set[nn.Module](), dict[str, Tensor]()

        def read(name: str) -> Tensor:
            """A tensor; one that stands for two, once for both."""
            own = self._tied.get(name, name)
            if own not in self._tied.values():
                return self._read(own)
            if own not in shared:
                shared[own] = self._read(own).to(self.device).to(self._dtype)
            return shared[own]

        def load(part: nn.Module, name: str) -> None:
            if part not in loaded:
                loaded.add(part)
                load_own(
                    part,
                    name,
                    read,
                    owner=self._model,
                    stored=self._stored,
                    device=self.device,
                    dtype=self._dtype,
                )

        for name, part in self._model.named_modules():
            if next(part.parameters(recurse=False), None) is not None or part._buffers:
                handles.append(part.register_forward_pre_hook(lambda m, _, n=name: load(m, n)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for part in loaded:
                part.to("meta")

    def go_on(self, inputs: list[Tensor], quantized_inputs: list[Tensor] | None) -> None:
        """Take up hidden states that were kept, in place of those that `start` made."""
        assert [len(x) for x in inputs] == [len(x) for x in self.inputs]
        self.inputs = inputs
        if self.quantized_inputs is not None:
            assert quantized_inputs is not None
            self.quantized_inputs = quantized_inputs

    @torch.no_grad()
    def finish(self) -> None:
        """Replace the samples by what the layer that gives logits reads of them: [tokens, hidden].

        The model's code makes it of the last block's outputs, by a norm as a rule.
        """
        last, seen = self._last, list[Tensor]()
        assert isinstance(last, _Last), "the samples were not embedded"

        def stop(_: nn.Module, args: tuple[Tensor]) -> None:
            seen.append(args[0])
            raise _AllRecordedError

        head = self._model.get_output_embeddings().register_forward_pre_hook(stop)
        try:
            with self._loaded_when_called():
                for i, hidden in enumerate(self.inputs):
                    last.after = hidden[None].to(self.device)
                    with suppress(_AllRecordedError):
                        self._model(inputs_embeds=last.after, use_cache=False)
                    self.inputs[i] = to_host(seen.pop()[0])
        finally:
            head.remove()
            last.after = None

    def load(self, index: int, then: int | None = None) -> DecoderBlock:
        """Read a block's weights; its samples are those that `start` or `advance` left.

        Args:
            index: Number of the block.
            then: That of the block that is loaded next, if there is one: where blocks run on a GPU
                it is read meanwhile.

        Raises:
            CheckpointError: a weight has another shape than the configuration says.
        """
        module = copy.deepcopy(self._meta_blocks[index])
        materialize(
            module,
            self._read,
            owner=self._model,
            prefix=f"{self._list}.{index}",
            stored=self._stored,
            device=self.device,
            dtype=self._dtype,
        )
        if then is not None and then < len(self.blocks) and self.device.type == "cuda":
            self._read.expect(self._stored_names(then))
        block = DecoderBlock(
            self.blocks[index],
            self._family,
            self._attentions[index],
            module.eval(),
            self.inputs,
            self._given[index],
            self.quantized_inputs,
            self.device,
            self._names(index),
        )
        block.sinks = self.sinks
        return block

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
            outputs = block.outputs()
        self.inputs[:] = outputs
        if self.quantized_inputs is not None:
            assert quantized_outputs is not None
            self.quantized_inputs[:] = quantized_outputs
        block.module.to("meta")


def _same(one: Given, other: Given) -> bool:
    """Whether a block was handed the same, tensors with all their values."""
    return _alike(one.args, other.args) and _alike(dict(one.kwargs), dict(other.kwargs))


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return isinstance(one, Tensor) == isinstance(other, Tensor)
