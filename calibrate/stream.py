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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from calibrate.attention import ATTENTION, BESIDE
from calibrate.block import DecoderBlock
from calibrate.handed import AllRecordedError, Handed, LastRecorder, Place, Recorder, rows_of_blocks
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
from formats.modeling.model import meta_model, renamed_modules
from formats.modeling.trace import handed_empty


class BlockStream:
    """The blocks of a model, one at a time.

    Args:
        read: Gives a tensor of the checkpoint by its name.
        dtype: Type they are computed in.
        quantized_path: Whether to keep, beside each sample's hidden states in the float model,
            those after the quantized blocks.

    Attributes:
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
        self._handed = [Handed() for _ in self.blocks]
        self._last: Recorder | None = None

    def _refuse_unknown_attention(self) -> None:
        """Refuse what changes attention and is not computed here.

        Raises:
            CheckpointError: the model's code hands it to attention.
        """
        for site in self._found.attentions if self._found else ():
            unknown = set(site.arguments) - BESIDE.keys() - {"mask"}
            masked = "mask" in site.arguments and len(site.arguments) > 1
            if unknown or masked:
                names = ", ".join(sorted(unknown or site.arguments))
                raise CheckpointError(
                    f"{site.module}: its code hands attention {names}, which is not computed here"
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
                are handed something of a sample that is not kept.
        """
        recorders = self._recorders()
        self._last = recorders[-1]
        self.inputs = []
        with self._loaded_when_called():
            of_tokens = self._prepare(sequences[0], recorders)
            for ids in sequences:
                self.inputs.append(self._embed(ids, recorders))
                noted = zip(self._handed, recorders, of_tokens, strict=True)
                for handed, recorder, places in noted:
                    handed.note(len(ids), recorder.given, places)
        if self.quantized_inputs is not None:
            self.quantized_inputs = list(self.inputs)

    def _recorders(self) -> list[Recorder]:
        """Put recorders into the places of the blocks."""
        found = [block.outputs for block in self._found.blocks] if self._found else None
        outputs = found or [None] * len(self._meta_blocks)
        kinds = [Recorder] * (len(outputs) - 1) + [LastRecorder]
        each = zip(kinds, self._meta_blocks, outputs, strict=True)
        recorders = [kind(block, count) for kind, block, count in each]
        parent, _, name = self._list.rpartition(".")
        setattr(self._model.get_submodule(parent), name, nn.ModuleList(recorders))
        return recorders

    def _embed(self, ids: Tensor, recorders: list[Recorder]) -> Tensor:
        """Hidden states of a sample before the first block, in the host's memory."""
        with suppress(AllRecordedError):
            self._model(input_ids=ids[None].to(self.device), use_cache=False)
        hidden = recorders[0].hidden
        assert hidden is not None
        return to_host(self._handed[0].rows.hidden(hidden))

    def _prepare(self, ids: Tensor, recorders: list[Recorder]) -> list[list[Place]]:
        """Find out, by a sample and another one, what blocks are handed.

        Returns:
            Of each block, which of its arguments depend on the tokens.
        """
        self._handed = [Handed() for _ in self.blocks]
        if self._found is None:
            return [[] for _ in self.blocks]
        self._embed(ids, recorders)
        first = [recorder.given for recorder in recorders]
        hidden = recorders[0].hidden
        assert hidden is not None
        streams = len(hidden) if hidden.dim() == 4 else None
        filled = handed_empty(first[0].kwargs)
        each = rows_of_blocks(self._found, filled, streams)
        for handed, rows in zip(self._handed, each, strict=True):
            handed.rows = rows
        self._embed(ids.flip(0), recorders)
        found = []
        for block, given, recorder in zip(self.blocks, first, recorders, strict=True):
            places = given.of_tokens(recorder.given)
            if places is None:
                raise CheckpointError(
                    f"{block}: its code hands it more of the tokens than tensors, which "
                    "calibration block by block does not keep"
                )
            found.append(places)
        return found

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
        layer = self._model.get_output_embeddings()
        hook = layer.register_forward_hook(lambda _, __, out: on_output(out))
        with hook, self._after_blocks() as last:

            def logits(ids: Tensor, hidden: Tensor) -> Tensor:
                last.after = self._states(hidden)
                return self._model(input_ids=ids[None].to(self.device), use_cache=False).logits[0]

            yield logits

    @contextmanager
    def _after_blocks(self) -> Iterator[LastRecorder]:
        """For a while, the last block's recorder, from whose `after` the model's code goes on."""
        last = self._last
        assert isinstance(last, LastRecorder), "the samples were not embedded"
        try:
            with self._loaded_when_called():
                yield last
        finally:
            last.after = None

    @contextmanager
    def _loaded_when_called(self) -> Iterator[None]:
        """Load what is outside of the blocks when its code is called, and free it in the end."""
        loaded, shared = set[nn.Module](), dict[str, Tensor]()

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

        with ExitStack() as stack:
            for name, part in self._model.named_modules():
                if next(part.parameters(recurse=False), None) is not None or part._buffers:
                    hook = part.register_forward_pre_hook(lambda m, _, n=name: load(m, n))
                    stack.enter_context(hook)
            try:
                yield
            finally:
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
        seen = list[Tensor]()

        def stop(_: nn.Module, args: tuple[Tensor]) -> None:
            seen.append(args[0])
            raise AllRecordedError

        hook = self._model.get_output_embeddings().register_forward_pre_hook(stop)
        with hook, self._after_blocks() as last:
            for i, hidden in enumerate(self.inputs):
                last.after = self._states(hidden.to(self.device))
                with suppress(AllRecordedError):
                    self._model(**self._any_tokens(last.after), use_cache=False)
                self.inputs[i] = to_host(seen.pop()[0])

    def _states(self, hidden: Tensor) -> Tensor:
        """Hidden states after the last block, as the model's code has them."""
        return self._handed[-1].rows.states(hidden)

    def _any_tokens(self, states: Tensor) -> dict[str, Tensor]:
        """What a model is called with, as many tokens as these, where it does not matter which."""
        if not self._handed[0].own:
            return {"inputs_embeds": states}
        count = states.shape[-2]  # embeddings beside the first one ask for ids
        return {"input_ids": torch.zeros(1, count, dtype=torch.long, device=self.device)}

    def load(self, index: int, then: int | None = None) -> DecoderBlock:
        """Read a block's weights; its samples are those that `start` or `advance` left.

        Args:
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
            self._handed[index],
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
