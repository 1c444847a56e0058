"""A model that runs by transformers' own code: any causal decoder that `formats.modeling` knows.

Which models do so, and which run by the interpreters of declared families, `read_shape` says.

Its linear layers are a backend's, its attention works on our cache; all else (norms, rotation,
activations, routers, residuals, what is done with logits) is what transformers computes. Tokens of
a step, of any sequences, lie in one row with their positions.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.registry import find_family
from formats.modeling.config import transformers_config
from formats.modeling.layers import positions_of, structure_of
from formats.modeling.structure import Structure
from formats.namespace import later
from inference.models.config import ModelConfig
from inference.models.decoder import Decoder
from inference.models.layers import LayerFactory
from inference.models.model import KVHeads
from inference.transformers_code.attention import TAKEN, Step, running

with later():
    from inference.transformers_code import load, state

log = logging.getLogger("ptq.inference")

ENDLESS = 1 << 20  # positions of a model without attention, whose code counts none


@dataclass(frozen=True)
class CodeShape:
    """Shape of a decoder as its code has it; see `inference.models.model.ModelShape`.

    Attributes:
        windows: Sliding window of each layer with attention, None for full attention.
        places: Which layer of the cache each of these reads: its own, or that of an earlier one.
        cached: What the cache holds of a token, layer by layer of its own.
    """

    structure: Structure
    hidden_size: int
    vocab_size: int
    max_positions: int
    windows: tuple[int | None, ...]
    places: tuple[int, ...]
    cached: tuple[KVHeads, ...]

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> CodeShape:
        """Read and check a checkpoint's configuration.

        Raises:
            CheckpointError: it is no decoder that transformers' code runs over our cache.
        """
        structure = structure_of(checkpoint.config)
        config: Any = transformers_config(checkpoint.config).get_text_config()
        attentions, caches = structure.attentions, structure.caches
        places = {site.module: place for place, site in enumerate(caches)}
        if unknown := {name for own in attentions for name in own.arguments} - TAKEN:
            given = ", ".join(sorted(unknown))
            if "mask" in unknown:
                given = "a mask that is neither causal nor a sliding window"
            raise CheckpointError(
                f"config.json: model_type {checkpoint.config.get('model_type')!r} is not run here: "
                f"its code gives attention {given}"
            )
        most = positions_of(config) if attentions else ENDLESS
        reach = min((own.reach for own in attentions if own.reach is not None), default=most)
        if reach < most:
            log.warning(
                "%s attends in chunks of %d tokens, which requests have at most here; its "
                "config.json allows %d",
                checkpoint.path,
                reach,
                most,
            )
        return cls(
            structure,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_positions=min(reach, most),
            windows=tuple(own.window for own in attentions),
            places=tuple(places[own.lender or own.module] for own in attentions),
            cached=tuple(KVHeads(a.kv_heads, a.key_size, a.value_size) for a in caches),
        )

    @property
    def attention_span(self) -> float:
        """As of `inference.models.config.ModelConfig`."""
        full = sum(window is None for window in self.windows)
        return 3 * self.hidden_size * len(self.structure.blocks) / full if full else math.inf


Shape = ModelConfig | CodeShape


class CodeShaped(Protocol):
    """What a step needs to know of whatever runs by transformers' code."""

    config: CodeShape
    dtype: torch.dtype


class CodeModel:
    """A loaded model; `inference.models.decoder.Decoder` is its declared twin.

    Args:
        factory: The backend that it will run on: makes its linear layers.
        longest: Most tokens that a request may have.

    Attributes:
        module: transformers' model, its parts replaced.
        sink_tokens: Positions from the first on whose tokens have static input scales of their own.

    Raises:
        CheckpointError: tensors are missing or of another shape.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: CodeShape,
        factory: LayerFactory[Any, Any],
        longest: int,
    ) -> None:
        self.config, self.dtype, self.device = config, factory.dtype, factory.device
        self.sink_tokens = checkpoint.sinks.tokens if checkpoint.sinks.scales else 0
        self.module = load.load_code(checkpoint, config.structure, factory, longest)
        self._placed = "position_ids" in inspect.signature(self.module.forward).parameters
        by_distance = all("alibi" in site.arguments for site in config.structure.attentions)
        if not self._placed and not by_distance:
            raise CheckpointError(
                f"{type(self.module).__name__}: transformers' code does not take the positions of "
                "tokens; such a model is not run here"
            )

    @property
    def layers(self) -> Sequence[nn.Module]:
        """Its blocks, as transformers has them."""
        return list(self.module.get_submodule(self.config.structure.list).children())

    def with_layers(self, layers: Sequence[nn.Module]) -> Self:
        """This model with other blocks, as many and of the same shape."""
        other = copy.copy(self)
        path = self.config.structure.list.split(".")
        other.module = _with_part(self.module, path, nn.ModuleList(layers))
        return other

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return load.nbytes_of(self.module)

    @property
    def _stateful(self) -> list[state.Stateful]:
        kind = state.Stateful
        return [part for part in self.module.modules() if isinstance(part, kind)]

    def state_bytes(self, *, int8: bool = False) -> int:
        """Bytes of the states of a sequence, as they are or as they are kept in int8."""
        return sum(one.nbytes(int8=int8) for own in self._stateful for one in own.shapes)

    def keep_states(self, rows: int, int8: int | None = None) -> int:
        """Have rows of states for sequences and snapshots, so many of the last in int8 unless None;
        tells their bytes."""
        return sum(own.keep(rows, self.device, int8) for own in self._stateful)

    def copy_states(self, pairs: Sequence[tuple[int, int]], kept: int) -> None:
        """Copy states from first to second row of each pair, in their order; those from row `kept`
        on are of snapshots."""
        for some in state.at_once(pairs, kept):
            sources, targets = torch.tensor(some, device=self.device).T
            for own in self._stateful:
                own.copy_rows(sources, targets, kept=some[0][0] >= kept)

    def round_states(self, row: int) -> None:
        """Have in a sequence's row the state it would have if it were kept now, and found."""
        for own in self._stateful:
            own.round_row(row)

    @torch.no_grad()
    def logits(self, step: Step) -> Tensor:
        """Run the tokens of a step; their K and V go into the cache.

        Returns:
            Logits fp32 [R, vocabulary] of the rows wanted.
        """
        places = {"position_ids": step.positions[None]} if self._placed else {}  # asked for
        with running(step, len(self.config.places), self.sink_tokens):
            out = self.module(input_ids=step.ids[None], use_cache=False, **places)
        return out.logits[0]


def _with_part(module: nn.Module, path: Sequence[str], part: nn.Module) -> nn.Module:
    """A module with another part somewhere inside; nothing else is copied."""
    twin, inner = copy.copy(module), module.get_submodule(path[0])
    twin._modules = dict(module._modules)
    twin._modules[path[0]] = part if len(path) == 1 else _with_part(inner, path[1:], part)
    return twin


def check_config(checkpoint: Checkpoint) -> None:
    """Refuse a config.json that describes no model, before anything else reads it.

    Raises:
        CheckpointError: what it says is missing, wrong or not run here.
    """
    if find_family(checkpoint.config) is None:
        transformers_config(checkpoint.config)
    else:
        ModelConfig.of(checkpoint.config)


def read_shape(
    checkpoint: Checkpoint, factory: LayerFactory[Any, Any], *, transformers_code: bool = False
) -> Shape:
    """The shape of a checkpoint's model, which says whose code will run it.

    A declared family that the device's kernels refuse runs by transformers' code, which is logged.

    Args:
        factory: The backend that it will run on.
        transformers_code: Run a declared family by transformers' code, too.

    Raises:
        CheckpointError: it is a model that neither runs.
    """
    kind = checkpoint.config.get("model_type")
    if find_family(checkpoint.config) is None:
        shape = CodeShape.from_checkpoint(checkpoint)
        log.info("%s: no family declares it; transformers' own code runs it", kind)
        return shape
    if transformers_code:
        return CodeShape.from_checkpoint(checkpoint)
    declared = ModelConfig.of(checkpoint.config)
    try:
        factory.check(declared)
    except CheckpointError as refused:
        shape = CodeShape.from_checkpoint(checkpoint)
        log.warning("%s; transformers' own code runs it there, more slowly", refused)
        return shape
    return declared


def load_model(
    checkpoint: Checkpoint, shape: Shape, factory: LayerFactory[Any, Any], longest: int
) -> Decoder[Any, Any] | CodeModel:
    """Load a model for requests of up to so many tokens.

    Raises:
        CheckpointError: tensors are missing or do not fit.
    """
    if isinstance(shape, CodeShape):
        return CodeModel(checkpoint, shape, factory, longest)
    return Decoder(checkpoint, factory, longest)
